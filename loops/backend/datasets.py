"""The arguments of a dataset's operations, which TensorFlow's datasets keep in private attributes.

    _seed, _seed2              of Shuffle, ShuffleAndRepeat, Random         absent: named in a caveat of the run
    _reshuffle_each_iteration  of Shuffle                                   absent: the same
    _rerandomize               of Random                                    absent: the same
    _count                     of Repeat, ShuffleAndRepeat                  absent: the same
    _filename                  of Cache                                     absent: the same
    _deterministic             of ParallelMap, ParallelBatch, ParseExample  absent: the same; no order is assumed
    _batch_size, _buffer_size  of Batch, Shuffle and others                 absent: a change of it is not noticed
    _num_shards, _index        of Shard                                     absent: the same
    _count                     of Skip, Take                                absent: the same
    _batch_sizes               of Rebatch                                   absent: the same
    _size, _shift, _stride     of Window                                    absent: the same
    _start, _stop, _step       of Range                                     absent: the same
    _cycle_length, ...         _block_length, of Interleave                 absent: the same
    _selector_input            of DirectedInterleave                        absent: a change of weights is not noticed

A dataset's inputs and functions are found among its attributes by their type, whatever their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
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
    """The input datasets of a dataset, each once."""
    found = {id(part): part for part in _held(vars(dataset).values()) if isinstance(part, tf.data.Dataset)}
    return list(found.values())


def functions(dataset: Any) -> list:
    """The concrete functions that an operation calls."""
    held = [getattr(part, "function", None) for part in _held(vars(dataset).values())]
    return [function for function in held if hasattr(function, "captured_inputs") and hasattr(function, "graph")]


def argument(dataset: Any, name: str, default: object = None) -> Any:
    """An argument of the dataset's operation; the default if it is hidden."""
    value = getattr(dataset, f"_{name}", default)
    return tf.get_static_value(value) if tf.is_tensor(value) else value


def weights(dataset: Any) -> list[float] | None:
    """The constant weights of `sample_from_datasets`, as shares of 1; None if there are none."""
    selector = getattr(dataset, "_selector_input", None)
    for function in functions(selector) if isinstance(selector, tf.data.Dataset) else ():
        found = {node.name: node for node in function.graph.as_graph_def().node}
        drawn = next((node for node in found.values() if node.op == "StatelessMultinomial"), None)
        logits = found.get(drawn.input[0].split(":")[0]) if drawn else None
        if logits is not None and logits.op == "Const":
            shares = np.exp(tf.make_ndarray(logits.attr["value"].tensor)[0], dtype=np.float64)
            return [round(share, 6) for share in (shares / shares.sum()).tolist()]
    return None


def order(dataset: Any, kind: str) -> str:
    """A parallel operation's argument `deterministic`: "true", "false" or "default"."""
    return argument(dataset, "deterministic", "default" if "_deterministic" in _KEPT.get(kind, ()) else "true")


def unsaid(dataset: Any, kind: str, *, is_source: bool) -> list[str]:
    """What the installed TensorFlow hides of an operation and tested versions do not: "inputs", "functions", "count".

    Args:
        dataset: The dataset.
        kind: The operation's name in the table of operations.
        is_source: Whether the operation has no input.
    """
    found = [name.strip("_") for name in _KEPT.get(kind, ()) if not hasattr(dataset, name)]
    found += [] if is_source or inputs(dataset) else ["inputs"]
    found += ["functions"] if kind in _CALLS and not functions(dataset) else []
    return found


def _held(values: Iterable) -> Iterator:
    """The values, with lists, tuples and dicts flattened."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _held(value)
        elif isinstance(value, dict):
            yield from _held(value.values())
        else:
            yield value
