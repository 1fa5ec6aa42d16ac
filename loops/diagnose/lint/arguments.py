"""Checks and prepares the arguments of lint."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.support.batches import explaining, parts
from loops.support.errors import BadBatch, OutOfData


def check_arguments(model: object, loss: object, sample: object) -> None:
    """Checks the types of a model, a loss and a sample.

    Raises:
        scaler.InvalidArgument: If one of them has the wrong type.
    """
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(f"lint(model={model!r}): expected a keras.Model.")
    if not callable(loss):
        raise scaler.InvalidArgument(
            f"lint(loss={loss!r}): expected a function of (y, prediction) or a keras.losses.Loss, such as "
            "keras.losses.MeanSquaredError()."
        )
    _, y, _ = parts(sample, "lint")
    if y is None:
        raise scaler.InvalidArgument(
            f"lint(sample={type(sample).__name__}): expected a batch (x, y) or (x, y, sample_weight), such as "
            "next(iter(dataset))."
        )


def batch_of(sample: Any) -> Any:
    """The sample itself, or the first batch of a dataset.

    Raises:
        OutOfData: If the dataset is empty.
    """
    if not isinstance(sample, tf.data.Dataset):
        return sample
    batch = next(iter(sample), None)
    if batch is None:
        raise OutOfData("lint(sample): the dataset is empty.")
    return batch


def as_tensors(sample: Any) -> tuple:
    """Converts a batch to tensors.

    Raises:
        scaler.InvalidArgument: If the batch holds Python lists or numbers.
        BadBatch: If it has no examples.
    """
    given = tuple(part for part in sample if part is not None)
    if not all(hasattr(one, "shape") for one in tf.nest.flatten(given)):
        raise scaler.InvalidArgument(
            "lint(sample): the sample holds Python lists or numbers: expected arrays or tensors, such as "
            "(np.asarray(x), np.asarray(y))."
        )
    tensors = tf.nest.map_structure(tf.convert_to_tensor, given)
    if any(tensor.shape.rank and tensor.shape[0] == 0 for tensor in tf.nest.flatten(tensors)):
        raise BadBatch(f"lint: the sample is empty: {_lengths(tensors)}. Give a batch with at least one example.")
    return tensors


@contextlib.contextmanager
def explaining_misfit(model: keras.Model, sample: tuple) -> Iterator[None]:
    """Turns an error of a model or a loss into one sentence about the sample, if the sample is wrong.

    Raises:
        BadBatch: Instead of the original error, if the sample does not fit.
    """
    try:
        with explaining("lint", model, sample[0], sample[1]):
            yield
    except scaler.ScalerError:
        raise
    except (ValueError, TypeError, tf.errors.OpError):
        tensors = tf.nest.flatten(sample)
        if len({one.shape[0] for one in tensors if one.shape.rank}) < 2:
            raise
        raise BadBatch(
            f"lint: the parts of the sample differ in length: {_lengths(sample)}. Give the same number of each."
        ) from None


@contextlib.contextmanager
def in_one_sentence() -> Iterator[None]:
    """Turns any error of a model or a loss into one sentence, if its cause is unknown.

    Raises:
        BadBatch: Instead of the original error.
    """
    try:
        yield
    except scaler.ScalerError:
        raise
    except Exception as error:
        raise BadBatch(
            f"lint: the model or the loss failed on the sample: {_last_line(error)}. Run a train step on this "
            "sample first."
        ) from error


def _last_line(error: Exception) -> str:
    """An error's type and message, without the text that Keras and AutoGraph add."""
    text = re.sub(r"\x1b\[\d*m", "", str(error)).partition("Arguments received by")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = f"{type(error).__name__}: "
    message = lines[-1].removeprefix(kind) if lines else ""
    return kind + message[:200].rstrip(".")


def _lengths(sample: tuple) -> str:
    """The lengths of the parts, such as "x holds 16 examples, y holds 8 examples"."""
    lengths = []
    for name, part in zip(("x", "y", "sample_weight"), sample, strict=False):
        sizes = sorted({one.shape[0] for one in tf.nest.flatten(part) if one.shape.rank})
        lengths.append(f"{name} holds {' and '.join(map(str, sizes))} examples")
    return ", ".join(lengths)


def build(model: keras.Model, sample: tuple) -> None:
    """Builds a model on the sample, unless it is built already.

    Raises:
        BadBatch: If the sample does not fit the model.
    """
    if not model.built:
        with in_one_sentence(), explaining_misfit(model, sample):
            model(tf.nest.map_structure(tf.zeros_like, sample[0]), training=False)
