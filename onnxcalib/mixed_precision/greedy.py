"""The two greedy baselines, for comparison with the integer program."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from onnxcalib.mixed_precision.search_space import AdditiveMetric, Choices, Constraint, Group, SearchSpace
from onnxcalib.recipe import Precision

Rule = Callable[[SearchSpace, Precision, Constraint, AdditiveMetric], Choices | None]


def lower_most_robust(space: SearchSpace, base: Precision, limit: Constraint, loss: AdditiveMetric) -> Choices | None:
    """From the base on, take the cheapening move with the least loss increase until the limit holds, if it can."""
    choices = {name: choice for group in space.groups for name, choice in _at_base(space, group, base).items()}
    moves: list[tuple[float, float, int, Choices]] = []

    def offer(index: int) -> None:
        best = min(
            _moves(space, space.groups[index], choices, limit.metric, loss), key=lambda move: move[:2], default=None
        )
        if best is not None:
            heapq.heappush(moves, (best[0], best[1], index, best[2]))

    for index in range(len(space.groups)):
        offer(index)
    while not limit.holds(choices):
        if not moves:
            return None
        _, _, index, change = heapq.heappop(moves)
        choices |= change
        # Groups are independent, so only the group that moved has new moves.
        offer(index)
    return choices


def raise_smallest(space: SearchSpace, base: Precision, limit: Constraint, loss: AdditiveMetric) -> Choices | None:
    """From the cheapest on, raise layers to the base, smallest first, where the limit still holds, if it can."""
    cost = limit.metric
    choices = space.cheapest(cost, loss)
    if not limit.holds(choices):
        return None
    group_of = {name: group for group in space.groups for name in group}
    for layer in sorted(space.candidates, key=lambda name: (cost.values[name][base], name)):
        target = base if base in space.candidates[layer] else space.candidates[layer][0]
        raised = {**choices, layer: target}
        if target.activation != choices[layer].activation:
            group = group_of[layer]
            raised = {**choices, **_keep_weights(space, group, target.activation, choices, cost, loss), layer: target}
        if limit.holds(raised):
            choices = raised
    return choices


def _moves(
    space: SearchSpace, group: Group, choices: Choices, cost: AdditiveMetric, loss: AdditiveMetric
) -> Iterator[tuple[float, float, Choices]]:
    """Every cheapening move of a group: its loss increase, its negative cost change, and the layers that it changes."""
    bits = choices[group[0]].activation
    alone = len(group) == 1
    changes: list[Choices] = []
    for layer in group:
        changes += [{layer: choice} for choice in (space.candidates[layer] if alone else space.at_bits(layer, bits))]
    for other in [] if alone else space.shared_bits(group):
        changes.append(_keep_weights(space, group, other, choices, cost, loss))
        # Without this one, the group could stop short of its cheapest choice.
        changes.append(space.cheapest_at(group, other, cost, loss))
    for change in changes:
        before = {layer: choices[layer] for layer in change}
        saving = cost.part(change) - cost.part(before)
        if saving < 0:
            yield loss.part(change) - loss.part(before), saving, change


def _at_base(space: SearchSpace, group: Group, base: Precision) -> Choices:
    """Each layer at the base, or at the highest that overrides leave it."""
    common = space.shared_bits(group)
    bits = base.activation if base.activation in common else common[0]
    here = {layer: space.at_bits(layer, bits) for layer in group}
    return {layer: base if base in options else options[0] for layer, options in here.items()}


def _keep_weights(
    space: SearchSpace, group: Group, bits: int, choices: Choices, cost: AdditiveMetric, loss: AdditiveMetric
) -> Choices:
    """The group at other activation bits; a layer that lacks its weight bits there takes its cheapest choice."""
    moved = space.cheapest_at(group, bits, cost, loss)
    for layer in group:
        same = Precision(choices[layer].weight, bits)
        if same in space.candidates[layer]:
            moved[layer] = same
    return moved
