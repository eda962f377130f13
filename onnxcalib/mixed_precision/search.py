"""Exact search without a solver: group after group, keeping what can still become the best assignment."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onnxcalib.mixed_precision.search_space import Bound, Choices, Group, Measure, Space

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
# With more partial assignments than this, an integer program is the faster way.
STATES = 200_000
# Joining a group may make so many times as many, of which few remain.
JOINED = 50
# Sums within this share of their size may be equal but for rounding.
ROUNDING = 1e-13
# Ties that are compared exactly, one by one.
TIES = 100


@dataclass(frozen=True)
class Relaxed:
    """The bounds relaxed into the aim: an assignment within them has at least `least` of the priced measure less pay.

    Any prices that are not negative make this true; those of the linear relaxation make it sharp.
    """

    priced: Measure  # the aim's excess over every layer's least, and each bound's measure at its price
    least: float  # the least total of it
    prices: tuple[float, ...]  # of a unit of each bound's measure
    pay: float  # what all bounds, used up, are worth
    scale: float  # of the aim in the priced measure
    floor: float  # the aim with every layer at its least

    @property
    def rounding(self) -> float:
        """What two equal totals may differ by."""
        return 1e-12 * (self.least + self.pay + abs(self.floor) * self.scale)

    def above(self, total: float) -> float:
        """How far the aim's total of an assignment lies above what the relaxation proves."""
        return (total - self.floor) * self.scale + self.pay - self.least

    def within(self, gap: float) -> Bound:
        """What all assignments obey that lie no further above."""
        return Bound(self.priced, self.least + gap + self.rounding)


@dataclass(frozen=True)
class Found:
    """The best assignment, if there is one; where the search gave up it says nothing."""

    choices: Choices | None
    complete: bool = True


@dataclass(frozen=True)
class _States:
    """Partial assignments, a row each: their priced excess, and their totals of aim, bounds and tie breaker."""

    excess: Floats
    totals: Floats
    picks: Indices  # in a group: each layer's choice, by its place in the menu; beyond: the row before, and the group's

    def rows(self, kept: NDArray[np.bool_] | Indices) -> _States:
        return _States(self.excess[kept], self.totals[kept], self.picks[kept])


class _TooManyError(Exception):
    """The search would take longer than an integer program."""


def search(space: Space, aim: Measure, bounds: Sequence[Bound], tie: Measure, relaxed: Relaxed, gap: float) -> Found:
    """The least aim within the bounds, then the least tie breaker, among assignments within the gap."""
    wanted = _Search(space, aim, bounds, tie, relaxed, gap)
    try:
        found = wanted.run()
    except _TooManyError:
        return Found(None, complete=False)
    if wanted.missed:
        # What broke a bound by rounding alone may have driven out what keeps it.
        wanted.careful = True
        with contextlib.suppress(_TooManyError):
            return wanted.run()
    return found


class _Search:
    def __init__(
        self, space: Space, aim: Measure, bounds: Sequence[Bound], tie: Measure, relaxed: Relaxed, gap: float
    ) -> None:
        self.space, self.aim, self.bounds, self.tie = space, aim, bounds, tie
        self.relaxed, self.gap = relaxed, gap + relaxed.rounding
        self.measures = [aim, *(bound.measure for bound in bounds)]
        if tie not in self.measures:
            self.measures.append(tie)
        largest = [
            abs(it.fixed) + math.fsum(max(map(abs, it.values[layer].values())) for layer in space.menus)
            for it in self.measures
        ]
        self.rounding = ROUNDING * np.array(largest)
        self.careful = False  # keep what is worse by rounding alone
        self.missed = False  # whether the best seemed to keep the bounds, but for rounding did not
        self.most = np.array([bound.most - bound.measure.fixed for bound in bounds])

    def run(self) -> Found:
        groups = {group: self._group(group) for group in self.space.groups}
        settled = [states.totals[0] for states in groups.values() if len(states.excess) == 1]
        open_groups = [group for group, states in groups.items() if len(states.excess) > 1]
        # Steep groups first: what is left to come then moves the totals little for its price.
        open_groups.sort(key=lambda group: -self._steepness(groups[group]))
        rests = [_Rest.none(len(self.measures))]
        for group in reversed(open_groups):
            rests.append(rests[-1].before(groups[group]))
        start = np.sum([np.zeros(len(self.measures)), *settled], axis=0)
        states = _States(np.zeros(1), start[None, :], np.zeros((1, 0), np.intp))
        trail: list[tuple[Indices, Indices]] = []
        for group, rest in zip(open_groups, reversed(rests[:-1]), strict=True):
            states, parents, taken = self._join(states, groups[group], rest)
            if not len(states.excess):
                return Found(None)
            trail.append((parents, taken))
        return Found(self._best(states, groups, dict(zip(open_groups, trail, strict=True))))

    def _group(self, group: Group) -> _States:
        """What a group may take within the gap, by its excess over the least that it can be priced at."""
        parts = []
        for bits in self.space.shared_bits(group):
            menus = [self.space.at_bits(layer, bits) for layer in group]
            start = _States(np.zeros(1), np.zeros((1, len(self.measures))), np.zeros((1, 0), np.intp))
            for layer, menu in zip(group, menus, strict=True):
                priced = np.array([self.relaxed.priced.values[layer][it] for it in menu])
                totals = np.array([[measure.values[layer][it] for measure in self.measures] for it in menu])
                picks = np.array([[self.space.menus[layer].index(it)] for it in menu])
                start = self._grown(start, _States(priced, totals, picks))
            parts.append(start)
        states = _stacked(parts)
        states = replace(states, excess=states.excess - states.excess.min())
        return self._undominated(states.rows(states.excess <= self.gap))

    def _grown(self, states: _States, more: _States) -> _States:
        """A group's partial assignments with one layer more."""
        excess = (states.excess[:, None] + more.excess).ravel()
        kept = np.flatnonzero(excess <= excess.min() + self.gap)
        old, new = np.divmod(kept, len(more.excess))
        self._check(len(kept))
        picks = np.concatenate([states.picks[old], more.picks[new]], axis=1)
        return self._undominated(_States(excess[kept], states.totals[old] + more.totals[new], picks))

    def _join(self, states: _States, step: _States, rest: _Rest) -> tuple[_States, Indices, Indices]:
        """The partial assignments with one group more, and where each came from."""
        by_excess = np.argsort(step.excess, kind="stable")
        counts = np.searchsorted(step.excess[by_excess], self.gap - states.excess, side="right")
        self._check(int(counts.sum()) // JOINED)
        parts = []
        for some in np.array_split(np.arange(len(counts)), 1 + int(counts.sum()) // STATES):
            old = np.repeat(some, counts[some])
            new = by_excess[np.arange(len(old)) - np.repeat(counts[some].cumsum() - counts[some], counts[some])]
            excess, totals = states.excess[old] + step.excess[new], states.totals[old] + step.totals[new]
            joined = _States(excess, totals, np.stack([old, new], axis=1))
            parts.append(joined.rows(self._reachable(joined, rest)))
        joined = self._undominated(_stacked(parts))
        self._check(len(joined.excess))
        return joined, joined.picks[:, 0], joined.picks[:, 1]

    def _reachable(self, states: _States, rest: _Rest) -> NDArray[np.bool_]:
        """Which of the partial assignments can end within every bound, and leave no more of it unused than they may."""
        count = len(self.bounds)
        left = (self.gap - states.excess)[:, None]
        slack = 100 * self.rounding[1 : count + 1]
        over = (states.totals + rest.base)[:, 1 : count + 1] - self.most
        prices = np.array(self.relaxed.prices)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # No price times no gap is no number, which fmin passes over.
            down = np.fmin(rest.down, rest.down_for * left)[:, 1 : count + 1]
            up = np.fmin(rest.up, rest.up_for * left)[:, 1 : count + 1]
            unused = np.where(prices > 0, left / prices, np.inf)
            fits = (over - down <= slack) & (over + up >= -unused - slack)
        return np.asarray(fits.all(axis=1))

    def _undominated(self, states: _States) -> _States:
        """Without those that another is no worse than, where there are only two measures to compare by."""
        if len(self.measures) != 2 or not len(states.excess):
            return states
        aim, cost = states.totals[:, 0], states.totals[:, 1]
        order = np.lexsort((aim, cost))
        states, aim, cost = states.rows(order), aim[order], cost[order]
        # Costs that differ by rounding alone are not told apart: the exact check of a bound may.
        cheaper = np.searchsorted(cost, cost - self.rounding[1], side="left")
        best = np.concatenate([[np.inf], np.minimum.accumulate(aim)])
        kept = best[cheaper] > aim
        if not self.careful:
            kept &= np.concatenate([[True], cost[1:] != cost[:-1]])
        return states.rows(kept)

    def _steepness(self, states: _States) -> float:
        """How much of a bound's measure a group moves for its price, at most."""
        bounded = slice(1, len(self.bounds) + 1)
        with np.errstate(over="ignore"):
            moved = np.abs(_moved(states)[:, bounded]) / np.maximum(self.rounding[bounded], 1e-300)
            return float((moved.max(axis=1) / np.maximum(states.excess, self.relaxed.rounding + 1e-300)).max())

    def _best(
        self, states: _States, groups: dict[Group, _States], trail: dict[Group, tuple[Indices, Indices]]
    ) -> Choices | None:
        """The first in order that keeps every bound exactly, or the best of those that tie with it but for rounding."""
        aims, ties = states.totals[:, 0], states.totals[:, self.measures.index(self.tie)]
        order = np.lexsort((ties, aims))
        for first in order:
            if self._fits(self._trace(first, groups, trail)):
                break
            self.missed = True
        else:
            return None
        level = np.flatnonzero(aims <= aims[first] + self.rounding[0])
        level = level[np.argsort(ties[level], kind="stable")][:TIES]
        tied = [self._trace(index, groups, trail) for index in (first, *level)]
        return min(filter(self._fits, tied), key=lambda it: (self.aim.total(it), self.tie.total(it)))

    def _fits(self, choices: Choices) -> bool:
        return all(bound.measure.total(choices) <= bound.most for bound in self.bounds)

    def _trace(self, index: int, groups: dict[Group, _States], trail: dict[Group, tuple[Indices, Indices]]) -> Choices:
        taken = {group: int(states.excess.argmin()) for group, states in groups.items()}
        for group, (parents, items) in reversed(trail.items()):
            taken[group] = int(items[index])
            index = int(parents[index])
        return {
            layer: self.space.menus[layer][pick]
            for group, row in taken.items()
            for layer, pick in zip(group, groups[group].picks[row], strict=True)
        }

    def _check(self, count: int) -> None:
        if count > STATES:
            raise _TooManyError


@dataclass(frozen=True)
class _Rest:
    """The groups yet to come: what they total at their least price, and how far they can move that, at most."""

    base: Floats
    down: Floats
    up: Floats
    down_for: Floats  # for a unit of price
    up_for: Floats

    @classmethod
    def none(cls, count: int) -> _Rest:
        return cls(*(np.zeros(count) for _ in range(5)))

    def before(self, states: _States) -> _Rest:
        """With one group more to come."""
        moved = _moved(states)
        down, up = np.maximum(-moved, 0.0), np.maximum(moved, 0.0)
        price = np.maximum(states.excess, 1e-300)[:, None]
        with np.errstate(over="ignore"):
            steep_down, steep_up = (down / price).max(axis=0), (up / price).max(axis=0)
        return _Rest(
            self.base + states.totals[states.excess.argmin()],
            self.down + down.max(axis=0),
            self.up + up.max(axis=0),
            np.maximum(self.down_for, steep_down),
            np.maximum(self.up_for, steep_up),
        )


def _stacked(parts: Sequence[_States]) -> _States:
    excess, totals, picks = zip(*((part.excess, part.totals, part.picks) for part in parts), strict=True)
    return _States(np.concatenate(excess), np.concatenate(totals), np.concatenate(picks))


def _moved(states: _States) -> Floats:
    """What each row totals beside the one with the least price."""
    moved: Floats = states.totals - states.totals[states.excess.argmin()]
    return moved
