"""Explains in one sentence what is wrong with a batch on which a model, a loss or TensorFlow failed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import scaler
from loops.support.errors import BadBatch

UNEVEN = "a batch that is not a multiple of {replicas} replicas: batch with drop_remainder=True"
"""The message of the assertion in a step on replicas."""
_UNEVEN = re.compile(UNEVEN.format(replicas=r"\d+"))
_LABEL = re.compile(r"label value of (\S+) which is outside the valid range of \[0, (\d+)\)")
LABEL = "label value of {value} which is outside the valid range of [0, {rows})"
"""What TensorFlow says of one."""
INDEX = "an index in the batch is {value}, but the model has {rows} rows for it"
_INDEX = re.compile(r"an index in the batch is (\S+), but the model has (\d+) rows for it")


@scaler.authoring.no_autograph
def parts(batch: Any, who: str = "TrainStep") -> tuple[Any, Any, Any]:
    """`x`, `y` and `sample_weight` of a batch, with None for those that it lacks.

    Raises:
        scaler.InvalidArgument: For more parts, or none.
    """
    if not isinstance(batch, (tuple, list)):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise scaler.InvalidArgument(
            f"{who}: a batch has {len(batch)} parts: expected (x, y) or (x, y, sample_weight). Pass several inputs as "
            "one x, a tuple or a dict of them: ((a, b), y)."
        )
    x, y, sample_weight = (*batch, None, None)[:3]
    return x, y, sample_weight


def why_not(model: Any, x: Any, y: Any) -> str | None:
    """What seems wrong with a batch for a model and a loss, or None.

    Call it only after a failure: a user's own model or loss may accept what looks wrong here.

    Args:
        model: A Keras model, or another function.
        x: Inputs.
        y: Targets, or None.
    """
    inputs, given, targets = _expected(model), _shaped(x), _shaped(y)
    texts = [one for one in (*given, *targets) if one.dtype in (tf.string, "object", "str")]
    if texts and not any(str(one.dtype) == "string" for one in inputs):
        return _TEXT
    pairs = zip(given, inputs, strict=True) if len(given) == len(inputs) else ()
    shapes = [(tf.TensorShape(one.shape), tf.TensorShape(other.shape)) for one, other in pairs]
    flat = bool(shapes) and all(one.rank is not None and one.rank + 1 == other.rank for one, other in shapes)
    if flat or 0 in _ranks(given) or (targets and set(_ranks(targets)) == {0}):
        return (
            f"the batch is a single example: x has shape {_shapes(given)}, without a batch dimension. Batch the "
            "dataset, such as with dataset.batch(32)."
        )
    if not all(one.is_compatible_with(other) for one, other in shapes):
        return f"x has shape {_shapes(given)}, but the model takes {', '.join(str(tuple(b.shape)) for b in inputs)}."
    if y is None:
        return "the batch has no y: expected batches of (x, y), or a loss function that works without y."
    return None


@contextlib.contextmanager
def explaining(who: str, model: Any, x: Any, y: Any) -> Iterator[None]:
    """Replaces an error in the body by one sentence on what is wrong with the batch.

    Args:
        who: The start of the sentence.
        model: A Keras model, or another function.
        x: Inputs.
        y: Targets, or None.

    Raises:
        BadBatch: In place of another error, if the batch looks wrong.
    """
    try:
        yield
    except scaler.ScalerError:
        raise
    except (ValueError, TypeError, AttributeError, IndexError, tf.errors.OpError) as error:
        known = bad_batch(error, (x, y)) if isinstance(error, tf.errors.OpError) else None
        reason = why_not(model, x, y)
        if known is None and reason is None:
            raise
        raise known or BadBatch(f"{who}: {reason}") from None


def bad_batch(error: tf.errors.OpError, spec: Any) -> BadBatch | None:
    """A `BadBatch` for an error of TensorFlow that is about the data, else None.

    Args:
        error: An error from a compiled step.
        spec: The dataset's element_spec.
    """
    label = label_in(error)
    if label:
        value, rows = label
        return BadBatch(f"a label is {value}, but the model has {rows} classes, 0 to {rows - 1}. {MEND_LABELS}")
    index = _INDEX.search(error.message)
    if index:
        value, rows = int(index[1]), int(index[2])
        return BadBatch(
            f"an index in the batch is {value}, but the model has {rows} rows for it, 0 to {rows - 1}. Correct the "
            "batch, or give the layer one row for each index."
        )
    uneven = _UNEVEN.search(error.message)
    if uneven:
        return BadBatch(f"{uneven.group()}.")
    if "Cast string to" in error.message and any(
        getattr(one, "dtype", None) == tf.string for one in tf.nest.flatten(spec)
    ):
        return BadBatch(_TEXT)
    return None


def label_in(error: tf.errors.OpError) -> tuple[int, int] | None:
    """The label outside of a model's classes that an error is about, and the number of classes; else None."""
    found = _LABEL.search(error.message)
    return (int(found[1]), int(found[2])) if found else None


MEND_LABELS = "Correct the labels, or give the last layer one unit for each class."

_TEXT = "the batch holds text, which a model cannot compute with: turn it into numbers in the dataset's map."


def _expected(model: Any) -> list:
    """The inputs of a model that was built for some; empty for others."""
    try:
        return tf.nest.flatten(model.inputs)
    except (AttributeError, ValueError):
        return []


def _shaped(structure: Any) -> list:
    """The tensors and arrays of a part of a batch."""
    return [one for one in tf.nest.flatten(structure) if hasattr(one, "shape") and hasattr(one, "dtype")]


def _ranks(tensors: list) -> list[int | None]:
    return [tf.TensorShape(one.shape).rank for one in tensors]


def _shapes(tensors: list) -> str:
    return ", ".join(str(tf.TensorShape(one.shape)) for one in tensors)
