"""The space of assignments: who may take what, what it totals, and which choices others dominate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxcalib.recipe import Precision

Group = tuple[str, ...]
Choices = dict[str, Precision]


@dataclass(frozen=True)
class AdditiveMetric:
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
class Constraint:
    """The most that a metric may total."""

    metric: AdditiveMetric
    most: float

    def holds(self, choices: Mapping[str, Precision]) -> bool:
        """Whether the assignment keeps it, exactly."""
        return self.metric.total(choices) <= self.most


@dataclass(frozen=True)
class SearchSpace:
    """The assignments to choose from: each layer's candidates, highest first, and who shares activation bits."""

    candidates: Mapping[str, tuple[Precision, ...]]
    groups: tuple[Group, ...]

    def shared_bits(self, group: Group) -> list[int]:
        """The activation bits that every layer of the group can take, highest first."""
        common = set.intersection(*({choice.activation for choice in self.candidates[layer]} for layer in group))
        return sorted(common, reverse=True)

    def at_bits(self, layer: str, bits: int) -> tuple[Precision, ...]:
        """What the layer may take with these activation bits."""
        return tuple(choice for choice in self.candidates[layer] if choice.activation == bits)

    def shared_only(self) -> SearchSpace:
        """The space without the activation bits that some layer of a group cannot take."""
        candidates = dict(self.candidates)
        for group in self.groups:
            common = set(self.shared_bits(group))
            for layer in group:
                candidates[layer] = tuple(choice for choice in candidates[layer] if choice.activation in common)
        return SearchSpace(candidates, self.groups)

    def floor(self, metric: AdditiveMetric) -> dict[str, float]:
        """The least that each layer can have of a metric."""
        return {layer: min(metric.values[layer][it] for it in offered) for layer, offered in self.candidates.items()}

    def columns(self) -> list[tuple[str, Precision]]:
        """Every layer with each of its choices, in a fixed order."""
        return [(layer, choice) for layer, offered in self.candidates.items() for choice in offered]

    def above_floor(self, metric: AdditiveMetric) -> NDArray[np.float64]:
        """What each column has of a metric beyond its layer's least."""
        floor = self.floor(metric)
        return np.array([metric.values[layer][choice] - floor[layer] for layer, choice in self.columns()])

    def undominated(self, metrics: Sequence[AdditiveMetric]) -> SearchSpace:
        """The space without choices that another beats or equals in every metric; of equals the higher bits stay."""
        candidates = dict(self.candidates)
        for group in self.groups:
            for layer in group:
                offered = candidates[layer]
                values = np.array([[metric.values[layer][it] for metric in metrics] for it in offered])
                beats = (values[:, None, :] <= values[None, :, :]).all(axis=2)
                # Of two that beat each other, the one that stands first, the higher, wins.
                beats &= ~beats.T | np.tri(len(offered), k=-1, dtype=bool).T
                if len(group) > 1:  # others of the group may need these activation bits
                    bits = np.array([choice.activation for choice in offered])
                    beats &= bits[:, None] == bits
                beaten = np.asarray(beats.any(axis=0))
                candidates[layer] = tuple(choice for choice, out in zip(offered, beaten, strict=True) if not out)
        return SearchSpace(candidates, self.groups)

    def cheapest(self, cost: AdditiveMetric, loss: AdditiveMetric) -> Choices:
        """The least total cost, exactly: nothing couples one group to another; ties go to the lower loss."""
        choices: Choices = {}
        for group in self.groups:
            offers = [self.cheapest_at(group, bits, cost, loss) for bits in self.shared_bits(group)]
            ranks = [(cost.part(offer), loss.part(offer)) for offer in offers]
            choices |= offers[ranks.index(min(ranks))]
        return choices

    def cheapest_at(self, group: Group, bits: int, cost: AdditiveMetric, loss: AdditiveMetric) -> Choices:
        """The group at these activation bits, each layer at its cheapest."""
        choices: Choices = {}
        for layer in group:
            ranked = [
                (cost.values[layer][it], loss.values[layer][it], -it.weight, it) for it in self.at_bits(layer, bits)
            ]
            choices[layer] = min(ranked)[-1]
        return choices
