"""What Keras knows while it calls a layer, and how a layer gets a variable after it was built.

get_global_attribute   holds the call that is running   absent: `UnsupportedVersion` when a layer is to get scales
                                                          from past steps, before anything has changed
_tracker               refuses new parts of a layer     absent: the same
                         that is built
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from scaler.backend.versions import unsupported


def in_training() -> bool:
    """Whether the layer that is being called is trained: what `training=True` of the outermost call says."""
    context = _state()("current_call_ctx")
    return bool(getattr(context, "training", None))


@contextlib.contextmanager
def open_to_variables(layer: Any) -> Iterator[None]:
    """Lets a layer that is built make further variables.

    Raises:
        UnsupportedVersion: If Keras has no way to, or does not say later which calls are trained.
    """
    tracker: Any = getattr(layer, "_tracker", None)
    if not hasattr(tracker, "unlock") or not hasattr(tracker, "locked"):
        raise unsupported("emulated", "has another way to refuse variables of a layer that is built.")
    _state()
    before = tracker.locked
    tracker.unlock()
    try:
        yield
    finally:
        if before:
            tracker.lock()


def _state() -> Any:
    try:
        from keras.src.backend.common.global_state import get_global_attribute
    except ImportError as error:
        raise unsupported("emulated", "does not say whether a call of a layer is training.") from error
    return get_global_attribute
