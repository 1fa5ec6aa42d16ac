"""Notices gradients of a rescaled model that still carry the scales of its groups.

A rescale marks the graph that it is differentiated in, and `Layerwise.unscale` removes the mark.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import tensorflow as tf

from scaler.backend.replicas import native
from scaler.errors import InvalidArgument

_Open: TypeAlias = "weakref.WeakKeyDictionary[Any, tuple]"
_graphs: weakref.WeakKeyDictionary[Any, _Open] = weakref.WeakKeyDictionary()


class _Eager(threading.local):
    def __init__(self) -> None:
        self.open: _Open = weakref.WeakKeyDictionary()


_eager = _Eager()


def mark_rescaled(layerwise: Any, variables: tuple) -> None:
    """To be called where a gradient passes a rescale, with the variables of its `Layerwise`."""
    _open()[layerwise] = variables


def mark_unscaled(layerwise: Any) -> None:
    """To be called where the scales of the groups are removed again."""
    _open().pop(layerwise, None)


def check_rescaled(weights: Iterable) -> None:
    """Refuses to apply gradients to weights of a rescaled model whose scales nobody has removed.

    Raises:
        InvalidArgument: If there is one.
    """
    if not _open():
        return
    own = {id(native(weight)) for weight in weights}
    for layerwise, variables in list(_open().items()):
        found = next((one for one in variables if id(one) in own), None)
        if found is not None:
            mark_unscaled(layerwise)  # The next step is another one.
            raise InvalidArgument(
                f"apply: the gradient of {found.name.split(':')[0]!r} passed a rescale, and still carries the scale of "
                "its group. Expected the gradients of layerwise.gradient(tape, scaled, variables), with the second "
                "object that hs.layerwise.insert_rescales returned; or use hs.TrainStep(..., layerwise=layerwise)."
            )


def _open() -> _Open:
    if tf.executing_eagerly():
        return _eager.open
    return _graphs.setdefault(tf.compat.v1.get_default_graph(), weakref.WeakKeyDictionary())
