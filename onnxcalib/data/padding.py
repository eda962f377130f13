"""Padding: which positions of a feed's sequences count, told by the mask among its inputs."""

from __future__ import annotations

import itertools

import numpy as np

from onnxcalib.data.spec import Array, Dataset, Feed
from onnxcalib.numerics.positions import Counts

NAME = "mask"  # what the name of an input says that tells padding
SAMPLES, FEEDS = 64, 8  # that are looked at: one that pads nothing may not show which input it is


def positions_that_count(feed: Feed) -> Counts | None:
    """True at each [batch, position] that is no padding; None where the feed has no mask, or pads nothing."""
    name = mask_name(feed)
    if name is None:
        return None
    counts: Counts = feed[name] != 0
    return None if counts.all() or not counts.any() else counts


def find_mask(data: Dataset) -> str | None:
    """The input that tells padding, by what the first samples show."""
    names = (mask_name(feed) for feed in itertools.islice(data.batches(SAMPLES), FEEDS))
    return next((name for name in names if name is not None), None)


def mask_name(feed: Feed) -> str | None:
    """The input that tells padding.

    It has the token ids' shape and holds only zeros and ones: the one that is called so, or one where all ids are the
    same, that of padding, wherever it is zero. Types of tokens are zero at ids of all kinds.
    """
    inputs = {name: value for name, value in feed.items() if value.ndim == 2 and value.dtype.kind in "iub"}
    masks = {name: value for name, value in inputs.items() if _holds_zeros_and_ones(value)}
    for name, mask in sorted(masks.items(), key=lambda item: NAME not in item[0].lower()):
        others = [value for other, value in inputs.items() if other != name and value.shape == mask.shape]
        if others and (NAME in name.lower() or any(_pads(mask == 0, ids) for ids in others)):
            return name
    return None


def _pads(where: Counts, ids: Array) -> bool:
    """Whether all ids there are the same, and others are not."""
    return len(np.unique(ids[where])) == 1 and len(np.unique(ids[~where])) > 1


def _holds_zeros_and_ones(values: Array) -> bool:
    return values.size > 0 and bool(values.max() <= 1) and bool(values.min() >= 0)
