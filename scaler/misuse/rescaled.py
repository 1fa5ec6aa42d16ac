"""Notices gradients of a rescaled model that still carry the scales of its groups.

A rescale leaves a mark in the graph that differentiates it, and `Layerwise.unscale` removes the mark.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from scaler.backend.replicas import native
from scaler.errors import InvalidArgument

_marks: weakref.WeakKeyDictionary[Any, tuple[object, tuple]] = weakref.WeakKeyDictionary()
"""Of each `Layerwise` whose gradients carry its scales: where, and the variables of its groups."""


def mark_rescaled(layerwise: Any, variables: tuple) -> None:
    """To be called where a gradient passes a rescale, with the variables of its `Layerwise`."""
    _marks[layerwise] = _here(), variables


def mark_unscaled(layerwise: Any) -> None:
    """To be called where the scales of the groups are removed again."""
    _marks.pop(layerwise, None)


def check_rescaled(weights: Iterable) -> None:
    """Refuses gradients that still carry the scales of a rescaled model's groups.

    Args:
        weights: What they belong to.

    Raises:
        InvalidArgument: If one is a variable of such a model.
    """
    own = {id(native(weight)) for weight in weights} if _marks else set()
    for layerwise, (place, variables) in list(_marks.items()):
        found = next((one for one in variables if id(one) in own), None)
        if found is not None and place == _here():
            mark_unscaled(layerwise)  # The next step is another one.
            raise InvalidArgument(
                f"apply: the gradient of {found.name.split(':')[0]!r} passed a rescale, and still carries the scale of "
                "its group. Expected the gradients of layerwise.gradient(tape, scaled, variables), with the second "
                "object that hs.layerwise.insert_rescales returned; or use hs.TrainStep(..., layerwise=layerwise)."
            )


def _here() -> object:
    """The graph that is traced here, or that there is none."""
    return None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())
