"""Second moments of what a layer reads, and of what that has lost, gathered batch by batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import Array

FloatArray = npt.NDArray[np.float64]


# Values of a group that wait to be multiplied together: products of few rows cost more than their arithmetic.
WAITING = 2**22


class Moments:
    """Means and products of rows [groups, rows, columns] of the float network and of the quantized one."""

    def __init__(self, *, moves: bool = True) -> None:
        self.rows = 0
        self._moves = moves  # else nothing asks for products with what was lost, which cost as much as squares
        self._origin: Array = np.zeros(())
        self._totals: tuple[FloatArray, ...] = ()
        self._waiting: list[tuple[Array, Array]] = []

    def update(self, wanted: Array, read: Array) -> None:
        """Takes the same rows of both networks."""
        self.rows += read.shape[1]
        self._waiting.append((wanted, read))
        if sum(each.size for _, each in self._waiting) >= WAITING:
            self._multiply()

    def _multiply(self) -> None:
        wanted, read = (np.concatenate(each, axis=1) for each in zip(*self._waiting, strict=True))
        self._waiting = []
        ones = np.ones((1, read.shape[1]), read.dtype)
        if not self._totals:  # sums of values far from zero would lose what sets them apart
            self._origin = ones @ read / np.float32(read.shape[1])
            groups, columns = read.shape[0], read.shape[2]
            shapes = [(groups, 1, columns)] * 2 + [(groups, columns, columns)] * (1 + self._moves)
            self._totals = tuple(np.zeros(shape) for shape in shapes)
        lost = np.subtract(wanted, read, out=wanted)
        read -= self._origin
        new = [ones @ read, ones @ lost, _products(read, read)]
        new += [_products(lost, read)] if self._moves else []
        for total, more in zip(self._totals, new, strict=True):
            np.add(total, more, out=total)

    @property
    def _sums(self) -> tuple[FloatArray, ...]:
        if self._waiting:
            self._multiply()
        return self._totals

    @property
    def means(self) -> tuple[FloatArray, FloatArray]:
        """The mean row of the float network and that of the quantized one."""
        read = self._sums[0] / self.rows + self._origin
        return read + self._sums[1] / self.rows, read

    @property
    def is_finite(self) -> bool:
        """Whether all that was read is a number."""
        return all(np.isfinite(each).all() for each in self._sums)

    def squares(self, *, centred: bool) -> FloatArray:
        """The mean of Xq Xq^T; centred: without what a bias takes."""
        return self._mean_product(0, 2, centred=centred)

    def lost(self, *, centred: bool) -> FloatArray:
        """The mean of (X - Xq) Xq^T."""
        return self._mean_product(1, 3, centred=centred)

    def _mean_product(self, left: int, place: int, *, centred: bool) -> FloatArray:
        own, read = (self._sums[each] / self.rows for each in (left, 0))
        found = self._sums[place] / self.rows - own.swapaxes(1, 2) @ read
        if centred:
            return found
        mean = read + self._origin
        return np.asarray(found + (mean if left == 0 else own).swapaxes(1, 2) @ mean)


def _products(left: Array, right: Array) -> Array:
    """The transposed of one times the other; of two axes, a square takes half the time."""
    if len(left) == 1:
        return np.asarray(left[0].T @ right[0])[None]
    return np.asarray(left.swapaxes(1, 2) @ right)
