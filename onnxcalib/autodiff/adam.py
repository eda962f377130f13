"""Adam on NumPy arrays, with a learning rate a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi, sqrt

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

# A block and its moments stay in the second-level cache through all the passes over them.
BLOCK = 1 << 14


@dataclass(frozen=True)
class _Block:
    """One block of a parameter: its values, its moments and which part of the gradient it takes."""

    name: str
    part: slice
    values: Array
    moments: tuple[Array, ...]
    scratch: Array


def cosine(step: int, steps: int) -> float:
    """The share of its rates that a step takes: all at the first, nearly nothing at the last."""
    return 0.5 * (1 + cos(pi * (step - 1) / steps))


class Adam:
    """Adam in place; the given arrays change with every step."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        rates: Mapping[str, float],
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self.rates = {name: rates[name] for name in parameters}
        self.betas = betas
        self.epsilon = epsilon
        self.steps = 0
        self.moments = {name: tuple(np.zeros(it.size, np.float32) for _ in range(2)) for name, it in parameters.items()}
        self._blocks = _blocks(parameters, self.moments)

    def step(self, gradients: Mapping[str, Array], scale: float = 1.0) -> None:
        """Moves every parameter against its gradient; the scale multiplies all rates."""
        self.steps += 1
        first, second = (1 - beta**self.steps for beta in self.betas)
        flat = _flat_gradients(gradients, self.rates)
        for block in self._blocks:
            gradient, scratch = flat[block.name][block.part], block.scratch
            mean, square = block.moments
            _average(mean, gradient, self.betas[0], scratch)
            np.multiply(gradient, gradient, out=scratch)
            _average(square, scratch, self.betas[1], scratch)
            np.sqrt(square, out=scratch)
            scratch *= np.float32(1 / sqrt(second))
            scratch += np.float32(self.epsilon)
            np.divide(mean, scratch, out=scratch)
            scratch *= np.float32(self.rates[block.name] * scale / first)
            np.subtract(block.values, scratch, out=block.values)

    def restore(self, steps: int, moments: Mapping[str, tuple[Array, ...]]) -> None:
        """Goes on from where another stood."""
        self.steps = steps
        for name, values in moments.items():
            for moment, value in zip(self.moments[name], values, strict=True):
                moment[:] = value


def _average(moment: Array, value: Array, beta: float, scratch: Array) -> None:
    moment *= np.float32(beta)
    np.multiply(value, np.float32(1 - beta), out=scratch)
    moment += scratch


def _flat_gradients(gradients: Mapping[str, Array], rates: Mapping[str, float]) -> dict[str, Array]:
    return {name: gradients[name].reshape(-1) for name in rates}


def _blocks(parameters: Mapping[str, Array], moments: Mapping[str, tuple[Array, ...]]) -> list[_Block]:
    scratch = np.empty(BLOCK, np.float32)
    blocks = []
    for name, values in parameters.items():
        if values.dtype != np.float32 or not values.flags.c_contiguous:
            # A copy would take the steps instead of the parameter.
            raise ValueError(f"parameter '{name}' is not a contiguous float32 array")
        flat = values.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            part = slice(start, min(start + BLOCK, flat.size))
            own = tuple(moment[part] for moment in moments[name])
            blocks.append(_Block(name, part, flat[part], own, scratch[: part.stop - start]))
    return blocks
