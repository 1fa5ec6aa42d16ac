"""What a dataset's operation was made with, which TensorFlow's datasets keep in private attributes.

    _seed, _seed2              of Shuffle, ShuffleAndRepeat, Random         absent: named in a caveat of the run
    _reshuffle_each_iteration  of Shuffle                                   absent: likewise
    _rerandomize               of Random                                    absent: likewise
    _count                     of Repeat, ShuffleAndRepeat                  absent: likewise
    _filename                  of Cache                                     absent: likewise
    _deterministic             of ParallelMap, ParallelBatch, ParseExample  absent: likewise; no order is assumed
    _batch_size, _buffer_size  of Batch, Shuffle and others                 absent: a change of it is not noticed
    _num_shards, _index        of Shard                                     absent: likewise
    _count                     of Skip, Take                                absent: likewise

The datasets that one is made of and the functions that it calls are found among its attributes, whatever their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

_KEPT = {
    "Shuffle": ("_seed", "_seed2", "_reshuffle_each_iteration"),
    "ShuffleAndRepeat": ("_seed", "_seed2", "_count"),
    "Random": ("_seed", "_seed2", "_rerandomize"),
    "Repeat": ("_count",),
    "Cache": ("_filename",),
    "ParallelMap": ("_deterministic",),
    "ParallelBatch": ("_deterministic",),
    "ParseExample": ("_deterministic",),
}
_CALLS = (
    *("Filter", "FlatMap", "GroupByReducer", "GroupByWindow", "Interleave", "LegacyParallelInterleave", "Map"),
    *("MapAndBatch", "ParallelInterleave", "ParallelMap", "Scan", "TakeWhile"),
)


def inputs(dataset: Any) -> list:
    """The datasets that one is made of, each once."""
    found = {id(part): part for part in _held(vars(dataset).values()) if isinstance(part, tf.data.Dataset)}
    return list(found.values())


def functions(dataset: Any) -> list:
    """The concrete functions that an operation calls."""
    held = [getattr(part, "function", None) for part in _held(vars(dataset).values())]
    return [function for function in held if hasattr(function, "captured_inputs") and hasattr(function, "graph")]


def argument(dataset: Any, name: str, default: object = None) -> Any:
    """One that the dataset was made with, where it is known; else the default."""
    value = getattr(dataset, f"_{name}", default)
    return tf.get_static_value(value) if tf.is_tensor(value) else value


def order(dataset: Any, kind: str) -> str:
    """What a parallel operation was told of the order of its elements: "true", "false" or "default"."""
    return argument(dataset, "deterministic", "default" if "_deterministic" in _KEPT.get(kind, ()) else "true")


def unsaid(dataset: Any, kind: str, *, is_source: bool) -> list[str]:
    """What the installed TensorFlow does not tell of an operation, though others do: "inputs", "functions", "count".

    Args:
        dataset: Any.
        kind: Its name in the table of operations.
        is_source: Whether there is nothing below it.
    """
    found = [name.strip("_") for name in _KEPT.get(kind, ()) if not hasattr(dataset, name)]
    found += [] if is_source or inputs(dataset) else ["inputs"]
    found += ["functions"] if kind in _CALLS and not functions(dataset) else []
    return found


def _held(values: Iterable) -> Iterator:
    """The values, and those in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _held(value)
        elif isinstance(value, dict):
            yield from _held(value.values())
        else:
            yield value
