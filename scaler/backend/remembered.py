"""What Keras remembers on its objects for itself.

_keras_logits   what a softmax or sigmoid was computed from   absent: one in float16 is known by its operation
_direction      whether a metric is to be large or small      absent: it is not known
"""

from __future__ import annotations

from typing import Any


def is_softmax_or_sigmoid(tensor: Any) -> bool:
    """Whether Keras remembers logits behind a tensor."""
    return hasattr(tensor, "_keras_logits")


def direction_of(metric: Any) -> str | None:
    """The word "up" for a metric that is to be large, "down" for one that is to be small; None if it is not known."""
    return getattr(metric, "_direction", None)
