"""Shuffles whose order a saved iterator does not bring back. Found by trying, with TensorFlow 2.21.

Each epoch of `shuffle` draws new seeds from a generator outside of the iterator. A saved iterator has them only while
it holds the shuffle: once a `batch`, `filter` or `take` above has seen the end, it lets go of it, and a `prefetch` or a
parallel `map` that reads ahead makes this happen long before the epoch ends. The run then resumes without an error, and
later epochs are shuffled differently. TensorFlow has no public way to walk a pipeline; what is inside of interleaved
datasets is not seen.
"""

from __future__ import annotations

import tensorflow as tf

_HOLD_ON = {"Shuffle", "Map", "ParallelMap", "Prefetch", "Cache", "Options"}


def forgotten_shuffle(dataset) -> str | None:
    """What stands between a `repeat` and a `shuffle` of the dataset that makes a saved iterator forget later epochs.

    Returns:
        The name of the operation, such as "batch"; None if there is none.
    """
    if _kind(dataset) == "Repeat":
        for part in _inputs(dataset):
            found = _between(part, None)
            if found:
                return found
    return next(filter(None, map(forgotten_shuffle, _inputs(dataset))), None)


def has_unseeded_shuffle(dataset) -> bool:
    """Whether a `shuffle` of the dataset has neither a seed of its own nor a global one."""
    if _reshuffles(dataset):
        seeds = [tf.get_static_value(getattr(dataset, name, None)) for name in ("_seed", "_seed2")]
        if all(value is not None and int(value) == 0 for value in seeds):
            return True
    return any(map(has_unseeded_shuffle, _inputs(dataset)))


def _between(dataset, culprit: str | None) -> str | None:
    kind = _kind(dataset)
    if kind == "Repeat":
        return None  # Epochs begin anew below this one.
    if _reshuffles(dataset) and culprit:
        return culprit
    if kind not in _HOLD_ON:
        culprit = culprit or kind.lower()
    return next(filter(None, (_between(part, culprit) for part in _inputs(dataset))), None)


def _reshuffles(dataset) -> bool:
    return _kind(dataset) == "Shuffle" and bool(getattr(dataset, "_reshuffle_each_iteration", True))


def _kind(dataset) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _inputs(dataset) -> list:
    return getattr(dataset, "_inputs", list)()
