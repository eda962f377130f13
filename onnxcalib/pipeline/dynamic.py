"""Which tensors layers read on grids that are found at run time, and whether the target has a form for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxcalib.errors import RecipeError
from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.recipe import FLOAT_BITS, MAX_BITS, Activations, Precision
from onnxcalib.recipe.overrides import Override
from onnxcalib.targets import Dynamic, Target

NOTHING = Override()


def dynamic_tensors(
    layers: Sequence[Layer], overrides: Mapping[str, Override], activations: Activations, target: Target
) -> tuple[str, ...]:
    """What layers ask for that read a tensor, or else what the recipe asks for where all of them can."""
    readers: dict[str, list[Layer]] = {}
    for layer in layers:
        readers.setdefault(layer.input, []).append(layer)
    found = []
    for tensor, reading in readers.items():
        asked = {own.dynamic for layer in reading if (own := overrides.get(layer.name, NOTHING)).dynamic is not None}
        if len(asked) == 2:
            names = " and ".join(f"'{layer.name}'" for layer in reading)
            raise RecipeError(f"`overrides` of {names}: what they read cannot be both static and dynamic.", "Choose.")
        if asked == {True} or (not asked and activations is Activations.DYNAMIC and can_be_dynamic(reading, overrides)):
            found.append(tensor)
    return tuple(found) if target.dynamic is not Dynamic.NONE else ()


def can_be_dynamic(layers: Sequence[Layer], overrides: Mapping[str, Override]) -> bool:
    """Whether all of these are products of matrices, on activations of eight bits."""
    return all(_obstacle(layer, overrides.get(layer.name, NOTHING).precision) is None for layer in layers)


def static_tensors(
    layers: Sequence[Layer], points: InsertionPoints, overrides: Mapping[str, Override]
) -> tuple[str, ...]:
    """What layers read on a static grid that might as well be found at run time, unless they are told otherwise."""
    found = []
    for name, tensor in points.tensors.items():
        readers = [layer for layer in layers if layer.name in tensor.layers]
        told = any(overrides.get(layer.name, NOTHING).dynamic is not None for layer in readers)
        if readers and not told and tensor.same_qparams_as is None and can_be_dynamic(readers, overrides):
            found.append(name)
    return tuple(found)


def check_dynamic(
    layers: Sequence[Layer], overrides: Mapping[str, Override], activations: Activations, target: Target
) -> None:
    """Raise a RecipeError for dynamic ranges that the target or a layer has no form for, or that nothing gets."""
    asked = [layer for layer in layers if overrides.get(layer.name, NOTHING).dynamic]
    words = f"`activations={activations.value!r}`" if activations is not Activations.STATIC else ""
    words = words or (f"`overrides` of '{asked[0].name}'" if asked else "")
    if not words:
        return
    if target.dynamic is Dynamic.NONE:
        raise RecipeError(f"{words}: target {target.name} has no form for ranges found at run time.", "Leave that out.")
    for layer in layers:
        own = overrides.get(layer.name, NOTHING)
        if activations is not Activations.STATIC and own.dynamic is None and own.precision is not None:
            bits = own.precision.activation
            if bits not in (MAX_BITS, FLOAT_BITS):
                hint = f"Give it {own.precision}+static."
                raise RecipeError(f"`overrides` of '{layer.name}': {words} has eight bits, not {own.precision}.", hint)
    for layer in asked:
        readers = [other for other in layers if other.input == layer.input]
        for other in readers:
            obstacle = _obstacle(other, overrides.get(other.name, NOTHING).precision)
            if obstacle is not None:
                reads = "" if other is layer else f" '{other.name}', which reads the same tensor,"
                raise RecipeError(f"`overrides` of '{layer.name}':{reads} {obstacle}.", "Leave it static.")
    if activations is not Activations.STATIC and not any(can_be_dynamic([layer], overrides) for layer in layers):
        raise RecipeError(f"{words} has no effect: there is no Gemm or MatMul that could be so.", "Leave that out.")


def _obstacle(layer: Layer, precision: Precision | None) -> str | None:
    """Why a layer cannot read a grid that is found at run time."""
    if not layer.has_sums:
        return f"a {layer.op} has static ranges only"
    if precision is not None and precision.activation != MAX_BITS:
        return f"dynamic ranges have eight bits, and it is {precision}"
    return None
