"""Padding: which positions of a feed's sequences count, told by the mask among its inputs."""

from __future__ import annotations

import numpy as np

from onnxcalib.data.spec import Array, Feed
from onnxcalib.numerics.positions import Counts

NAME = "mask"  # what the name of an input says that tells padding


def positions_that_count(feed: Feed) -> Counts | None:
    """True at each [batch, position] that is no padding; None where the feed has no mask, or pads nothing.

    A mask is an input of the token ids' shape that holds only zeros and ones: the one that is called so, or one where
    all ids are the same, that of padding, wherever it is zero. Types of tokens are zero at ids of all kinds.
    """
    inputs = {name: value for name, value in feed.items() if value.ndim == 2 and value.dtype.kind in "iub"}
    masks = {name: value for name, value in inputs.items() if _holds_zeros_and_ones(value)}
    for name, mask in sorted(masks.items(), key=lambda item: NAME not in item[0].lower()):
        others = [value for other, value in inputs.items() if other != name and value.shape == mask.shape]
        if not others:
            continue
        counts: Counts = mask != 0
        if NAME in name.lower():
            return None if counts.all() or not counts.any() else counts
        if any(len(np.unique(ids[~counts])) == 1 and _varies(ids[counts]) for ids in others):
            return counts
    return None


def _holds_zeros_and_ones(values: Array) -> bool:
    return values.size > 0 and bool(values.max() <= 1) and bool(values.min() >= 0)


def _varies(ids: Array) -> bool:
    return ids.size > 0 and bool((ids != ids.flat[0]).any())
