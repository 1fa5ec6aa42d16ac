"""What Keras stores on its objects for its own use.

_keras_logits   what a softmax or sigmoid was computed from   absent: one in float16 is known by its operation, and it
                                                              is nowhere, and so not lost by a copy
_keras_mask     which of a layer's steps are padding          absent: it is nowhere, and so not lost by a copy
_direction      whether a metric should be large or small     absent: the direction is unknown
_aggregate_additional_loss   what `compute_loss` adds of      absent: Keras raises its TypeError where a penalty is in
                             a penalty of a model             16 bits and the loss is not
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def is_softmax_or_sigmoid(tensor: Any) -> bool:
    """Whether Keras knows the tensor as the result of a softmax or sigmoid, with the logits behind it."""
    return hasattr(tensor, "_keras_logits")


def direction_of(metric: Any) -> str | None:
    """Returns "up" for a metric that should be large, "down" for one that should be small, None if unknown."""
    return getattr(metric, "_direction", None)


def cast_penalties(model: keras.Model) -> None:
    """Has `compute_loss` of a model add penalties in the dtype of Keras's losses, also those computed in 16 bits."""
    own = getattr(model, "_aggregate_additional_loss", None)
    if own is not None:
        model._aggregate_additional_loss = lambda loss: own(keras.ops.cast(loss, keras.config.floatx()))


def carry(source: Any, copy: Any, through: Callable[[Any], Any] = lambda tensor: tensor) -> Any:
    """Gives a copy of a layer's output what Keras stored on the original, and returns the copy.

    Args:
        source: The original.
        copy: The copy.
        through: What the copy's logits are made by from the original's, since a loss may be computed from them.
    """
    if hasattr(source, "_keras_logits"):
        copy._keras_logits = through(source._keras_logits)
    if hasattr(source, "_keras_mask"):
        copy._keras_mask = source._keras_mask
    return copy
