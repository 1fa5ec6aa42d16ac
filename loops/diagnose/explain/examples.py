"""Finds the example of a batch that holds non-finite values or a wrong label, or that makes a step fail.

An example is tried alone by filling the whole batch with it, which keeps the shapes and so the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.explanation import Label
from loops.diagnose.graph.origin import Frame, is_measured
from loops.diagnose.graph.scan import Scan


def example_of(batch: Any) -> int | None:
    """The position of the first example that holds a non-finite value, or None."""
    for part in tf.nest.flatten(batch):
        values, examples = _by_example(part)
        if values is None or not is_measured(values.dtype):
            continue
        bad = examples[~np.isfinite(_wide(values).reshape(len(examples), -1)).all(axis=1)]
        if len(bad):
            return int(bad.min())
    return None


def lost_columns(*batches: Any) -> tuple[tuple[int | str, int | None], ...]:
    """The columns that are not finite in any example of these batches.

    Args:
        *batches: Batches of the same structure.

    Returns:
        For each the key of its part in a batch of dicts, such as "image" or "left/image", else its place in the batch;
        and its position along the part's last axis, None for a part of one value per example. Sparse and ragged parts
        have none.
    """
    found = []
    for place, parts in zip(_places(batches[0]), zip(*map(tf.nest.flatten, batches), strict=True), strict=True):
        dense = all(isinstance(one, tf.Tensor) and one.shape.rank and is_measured(one.dtype) for one in parts)
        if not dense or 0 in parts[0].shape:
            continue
        lost = [~np.isfinite(_wide(one).reshape(-1, one.shape[-1] if one.shape.rank > 1 else 1)) for one in parts]
        if len({one.shape[1] for one in lost}) == 1 and any(len(one) for one in lost):
            columns = np.flatnonzero(np.concatenate(lost).all(axis=0)).tolist()
            found += [(place, column if parts[0].shape.rank > 1 else None) for column in columns]
    return tuple(found)


def _places(batch: Any) -> list[int | str]:
    """What the parts of a batch are known by, in their order: by the keys that lead to them, or by number."""
    paths = list(_paths(batch, ()))
    keys = ["/".join(key for key in path if isinstance(key, str)) for path in paths]
    if len(set(keys)) < len(keys):
        keys = ["/".join(map(str, path)) if key else "" for key, path in zip(keys, paths, strict=True)]
    return [key or number for number, key in enumerate(keys)]


def _paths(batch: Any, path: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    """The keys and positions that lead to each part, in the order in which TensorFlow flattens a batch."""
    if isinstance(batch, Mapping):
        for key in sorted(batch):
            yield from _paths(batch[key], (*path, str(key)))
    elif isinstance(batch, (tuple, list)):
        names = getattr(batch, "__match_args__", range(len(batch)))  # Those of a NamedTuple's fields.
        for name, part in zip(names, batch, strict=True):
            yield from _paths(part, (*path, name))
    else:
        yield path


def _wide(values: tf.Tensor) -> np.ndarray:
    """The values in a dtype that NumPy knows."""
    return values.numpy().astype(np.complex128 if values.dtype.is_complex else np.float64)


def _by_example(part: Any) -> tuple[tf.Tensor | None, np.ndarray]:
    """The values of a part of a batch, and for each row of them the position of its example."""
    if isinstance(part, tf.SparseTensor):
        return part.values, part.indices.numpy()[:, 0]
    if isinstance(part, tf.RaggedTensor):
        outer, *inner = (rows.numpy() for rows in part.nested_value_rowids())
        for rows in inner:
            outer = outer[rows]
        return part.flat_values, outer
    if isinstance(part, tf.Tensor) and part.shape.rank:
        return part, np.arange(len(part))
    return None, np.empty(0)


def example_to_blame(attempts: Attempts, factor: float, *, several: bool) -> int | None:
    """Finds by bisection the first example that makes the step fail alone, unless every example does.

    It does not find an example that fails only together with others.

    Args:
        attempts: The attempts at a step that is not finite. On several replicas each takes the same share of the batch.
        factor: A factor on the loss scale.
        several: Whether other examples may fail too. If False, the step must pass without this one.

    Returns:
        The position in the batch, or on several replicas in the share; None if there is no such example.
    """
    batch, replicas = attempts.moment.batch, attempts.moment.replicas
    count = length_of(batch) // replicas
    passed = False

    def fails(examples: Sequence[int]) -> bool:
        nonlocal passed
        # The whole batch is filled with them, for each replica.
        rows = np.tile(np.resize(examples, count), replicas)
        filled = tf.nest.map_structure(lambda one: tf.gather(one, rows), batch)
        failed = not attempts.take_at(factor, filled).finite
        passed = passed or not failed
        return failed

    examples: Sequence[int] | None = range(count)
    while examples and len(examples) > 1:
        middle = len(examples) // 2
        examples = next((half for half in (examples[:middle], examples[middle:]) if fails(half)), None)
    if not examples or (several and passed):
        return examples[0] if examples else None
    others = [one for one in range(count) if one != examples[0]]
    return examples[0] if others and not fails(others) else None


def is_empty(batch: Any) -> bool:
    """Whether a batch has parts with examples, and none of them holds one."""
    kinds = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)
    counts = [one.shape[0] for one in tf.nest.flatten(batch) if isinstance(one, kinds) and one.shape.rank]
    return bool(counts) and not any(counts)


def length_of(batch: Any) -> int:
    """The number of examples in a batch of dense parts; 0 if these differ in length, or one is not dense."""
    parts = tf.nest.flatten(batch)
    if not parts or not all(isinstance(one, tf.Tensor) and one.shape.rank for one in parts):
        return 0
    lengths = {len(one) for one in parts}
    return lengths.pop() if len(lengths) == 1 else 0


def label_behind(seen: Scan, frame: Frame) -> Label | None:
    """The label outside of the classes for which a tensor became NaN, or None if that has another reason.

    On a GPU and under XLA TensorFlow makes a NaN of it, in place of an error. The CPU's kernel refuses it, so that a
    step that XLA compiled may raise where it is repeated without XLA.
    """
    operation = seen.operations[frame.name]
    if operation.type != "SparseSoftmaxCrossEntropyWithLogits":
        return None
    logits, labels = (seen.values.get(tensor.name) for tensor in operation.inputs)
    if logits is None or labels is None:
        return None
    classes, given = int(logits.shape[-1]), np.asarray(labels).reshape(-1)
    outside = given[(given < 0) | (given >= classes)]
    return Label(int(outside[0]), classes) if len(outside) else None


def example_with(value: int, batch: Any) -> int | None:
    """The first example with a label; None unless one part of the batch alone has a whole number for each example."""
    parts = [one for one in tf.nest.flatten(batch) if isinstance(one, tf.Tensor) and one.dtype.is_integer]
    parts = [np.asarray(one) for one in parts]
    flat = [one.reshape(-1) for one in parts if one.ndim and one.size == len(one)]
    places = [np.flatnonzero(one == value) for one in flat]
    return int(places[0][0]) if len(places) == 1 and len(places[0]) else None
