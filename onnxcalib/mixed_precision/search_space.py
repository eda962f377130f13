"""The space of assignments: who may take what, what it totals, and what can be ruled out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxcalib.recipe import Precision

Group = tuple[str, ...]
Choices = dict[str, Precision]
# What may be ruled out is ruled out with this much care for rounding; the solver sees the rest.
SLOP = 1e-12


@dataclass(frozen=True)
class Measure:
    """A quantity that adds up over the layers: the estimated loss, or one of the costs."""

    label: str
    values: Mapping[str, Mapping[Precision, float]]
    fixed: float = 0.0

    def total(self, choices: Mapping[str, Precision]) -> float:
        """The correctly rounded sum over all layers, with the part that no choice changes."""
        return math.fsum([self.fixed, *(self.values[layer][choice] for layer, choice in choices.items())])

    def part(self, choices: Mapping[str, Precision]) -> float:
        """The sum over some layers."""
        return math.fsum(self.values[layer][choice] for layer, choice in choices.items())


@dataclass(frozen=True)
class Bound:
    """The most that a measure may total."""

    measure: Measure
    most: float


@dataclass(frozen=True)
class Space:
    """The assignments to choose from: what each layer may take, highest first, and who shares activation bits."""

    menus: Mapping[str, tuple[Precision, ...]]
    groups: tuple[Group, ...]

    def shared_bits(self, group: Group) -> list[int]:
        """The activation bits that every layer of the group can take, highest first."""
        common = set.intersection(*({choice.activation for choice in self.menus[layer]} for layer in group))
        return sorted(common, reverse=True)

    def at_bits(self, layer: str, bits: int) -> tuple[Precision, ...]:
        """What the layer may take with these activation bits."""
        return tuple(choice for choice in self.menus[layer] if choice.activation == bits)

    def shared_only(self) -> Space:
        """The space without the activation bits that some layer of a group cannot take."""
        menus = dict(self.menus)
        for group in self.groups:
            common = set(self.shared_bits(group))
            for layer in group:
                menus[layer] = tuple(choice for choice in menus[layer] if choice.activation in common)
        return Space(menus, self.groups)

    def floor(self, measure: Measure) -> dict[str, float]:
        """The least that each layer can have of a measure."""
        return {layer: min(measure.values[layer][choice] for choice in menu) for layer, menu in self.menus.items()}

    def columns(self) -> list[tuple[str, Precision]]:
        """Every layer with each of its choices, in a fixed order."""
        return [(layer, choice) for layer, menu in self.menus.items() for choice in menu]

    def above_floor(self, measure: Measure) -> NDArray[np.float64]:
        """What each column has of a measure beyond its layer's least."""
        floor = self.floor(measure)
        return np.array([measure.values[layer][choice] - floor[layer] for layer, choice in self.columns()])

    def shares(self, bound: Bound) -> NDArray[np.float64]:
        """The share of the bound's room that each column takes."""
        return self.above_floor(bound.measure) / self.room(bound)

    def room(self, bound: Bound) -> float:
        """What the bound leaves above every layer's least, with the rounding of the sums on the generous side."""
        least = [-value for value in self.floor(bound.measure).values()]
        return math.fsum([bound.most, -bound.measure.fixed, *least]) + 2 * math.ulp(bound.most)


def narrow(space: Space, bounds: Sequence[Bound]) -> Space | None:
    """The space without choices that break a bound whatever the other layers take; None if a layer has none left."""
    while True:
        if any(space.room(bound) <= 0 for bound in bounds):
            return None
        smaller = space
        for bound in bounds:
            smaller = Space(_within(smaller, bound), space.groups).shared_only()
            if not all(smaller.menus.values()):
                return None
        if smaller == space:
            return space
        space = smaller


def _within(space: Space, bound: Bound) -> dict[str, tuple[Precision, ...]]:
    """The menus without choices that break the bound even if all else, with shared bits, is at its least."""
    values = bound.measure.values
    least: dict[Group, dict[int, dict[str, float]]] = {}
    for group in space.groups:
        least[group] = {
            bits: {layer: min(values[layer][it] for it in space.at_bits(layer, bits)) for layer in group}
            for bits in space.shared_bits(group)
        }
    totals = {group: {bits: math.fsum(low.values()) for bits, low in at.items()} for group, at in least.items()}
    lowest = {group: min(total.values()) for group, total in totals.items()}
    room = math.fsum([bound.most, -bound.measure.fixed, *(-low for low in lowest.values())])
    room += SLOP * max(abs(bound.most), abs(room))
    menus: dict[str, tuple[Precision, ...]] = {}
    for group in space.groups:
        for layer in group:
            extra = {bits: totals[group][bits] - low[layer] - lowest[group] for bits, low in least[group].items()}
            menus[layer] = tuple(it for it in space.menus[layer] if extra[it.activation] + values[layer][it] <= room)
    return menus


def undominated(space: Space, measures: Sequence[Measure]) -> Space:
    """The space without choices that another is as good as in every measure; of equals the higher precision stays."""
    menus = dict(space.menus)
    for group in space.groups:
        for layer in group:
            menu = menus[layer]
            beats = _as_good(layer, menu, menu, measures)
            # Of two that beat each other, the one that stands first, the higher, wins.
            beats &= ~beats.T | np.tri(len(menu), k=-1, dtype=bool).T
            if len(group) > 1:
                bits = np.array([choice.activation for choice in menu])
                beats &= bits[:, None] == bits
            beaten = np.asarray(beats.any(axis=0))
            menus[layer] = tuple(choice for choice, out in zip(menu, beaten, strict=True) if not out)
        if len(group) > 1:
            menus |= _undominated_bits(Space(menus, space.groups), group, measures)
    return Space(menus, space.groups)


def _undominated_bits(space: Space, group: Group, measures: Sequence[Measure]) -> dict[str, tuple[Precision, ...]]:
    """The group's menus without bits for which other bits have, for every layer and choice, one as good."""
    bits = space.shared_bits(group)
    cover = {
        (one, other): all(
            _as_good(layer, space.at_bits(layer, one), space.at_bits(layer, other), measures).any(axis=0).all()
            for layer in group
        )
        for one in bits
        for other in bits
    }
    beaten = {low for one, low in cover if one != low and cover[one, low] and (one > low or not cover[low, one])}
    return {layer: tuple(it for it in space.menus[layer] if it.activation not in beaten) for layer in group}


def _as_good(
    layer: str, ones: Sequence[Precision], others: Sequence[Precision], measures: Sequence[Measure]
) -> NDArray[np.bool_]:
    """Whether each of the ones is at most each of the others in every measure."""
    left, right = (np.array([[m.values[layer][it] for m in measures] for it in menu]) for menu in (ones, others))
    return np.asarray((left[:, None, :] <= right[None, :, :]).all(axis=2))


def cheapest(space: Space, cost: Measure, loss: Measure) -> Choices:
    """The least total cost, exactly: nothing couples one group to another; ties go to the lower loss."""
    choices: Choices = {}
    for group in space.groups:
        offers = [cheapest_at(space, group, bits, cost, loss) for bits in space.shared_bits(group)]
        ranks = [(cost.part(offer), loss.part(offer)) for offer in offers]
        choices |= offers[ranks.index(min(ranks))]
    return choices


def cheapest_at(space: Space, group: Group, bits: int, cost: Measure, loss: Measure) -> Choices:
    """The group at these activation bits, each layer at its cheapest."""
    choices: Choices = {}
    for layer in group:
        ranked = [(cost.values[layer][it], loss.values[layer][it], -it.weight, it) for it in space.at_bits(layer, bits)]
        choices[layer] = min(ranked)[-1]
    return choices
