"""What lint refuses, and what it makes of its arguments."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.batches import explaining, parts

_EXAMPLES = 4
"""Examples of the batch that are kept: what is looked for does not depend on their number."""


def check_parts(model: object, loss: object, sample: object) -> None:
    """Refuses a model, a loss and a sample of the wrong kind."""
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


def small(model: keras.Model, sample: Any) -> tuple:
    """The first examples of a batch, as tensors.

    Args:
        model: One whose inputs are of a fixed batch keeps the whole batch.
        sample: The batch.
    """
    count = None if _fixed_batch(model) else _EXAMPLES
    return tuple(tf.nest.map_structure(lambda one: tf.convert_to_tensor(one)[:count], tuple(sample)))


def built(model: keras.Model, sample: tuple) -> None:
    """Builds a model that is not built, as its first step would.

    Raises:
        BadBatch: If the sample does not fit the model.
    """
    if not model.built:
        with explaining("lint", model, sample[0], sample[1]):
            model(tf.nest.map_structure(tf.zeros_like, sample[0]), training=False)


def _fixed_batch(model: keras.Model) -> bool:
    try:
        return any(one.shape and one.shape[0] is not None for one in tf.nest.flatten(model.inputs))
    except (AttributeError, ValueError):
        return False
