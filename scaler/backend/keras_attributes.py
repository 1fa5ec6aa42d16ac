"""What Keras stores on its objects for its own use.

_keras_logits   what a softmax or sigmoid was computed from   absent: one in float16 is known by its operation
_keras_mask     which of a layer's steps are padding          absent: it is nowhere, and so not lost by a copy
_direction      whether a metric should be large or small     absent: the direction is unknown
"""

from __future__ import annotations

from typing import Any


def is_softmax_or_sigmoid(tensor: Any) -> bool:
    """Whether Keras knows the tensor as the result of a softmax or sigmoid, with the logits behind it."""
    return hasattr(tensor, "_keras_logits")


def direction_of(metric: Any) -> str | None:
    """Returns "up" for a metric that should be large, "down" for one that should be small, None if unknown."""
    return getattr(metric, "_direction", None)


def carry(source: Any, copy: Any) -> Any:
    """Gives a copy of a layer's output what Keras stored on the original, and returns the copy."""
    for name in ("_keras_logits", "_keras_mask"):
        if hasattr(source, name):
            setattr(copy, name, getattr(source, name))
    return copy
