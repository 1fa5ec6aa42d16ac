"""Proposes a guarded denominator for a division by 0 or by almost 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from loops.diagnose.explain.remedies import Kind, Proposal
from loops.diagnose.graph.changes import APART
from loops.diagnose.graph.frames import Frame

_DIVISION = "RealDiv"
_OPERATORS = ("__truediv__", "__rtruediv__")


def division_proposals(frame: Frame, path: str | None) -> list[Proposal]:
    """A proposal to move the denominator, if the failure began in a division; else nothing.

    Args:
        frame: The tensor where it began, or the forward tensor if it began in a gradient.
        path: The path of the layer, or None for the loss and the step itself.
    """
    if frame.kind != _DIVISION:
        return []
    place = "the loss or the step" if path is None else repr(path)
    advice = (
        f"{place[0].upper()}{place[1:]} divides by 0, or by almost 0: move the denominator away from 0 by {APART:g}, "
        "or use tf.math.divide_no_nan."
    )
    name = f"denominator in {place} moved by {APART:g}"
    return [Proposal(Kind.DENOMINATOR, name, advice, lambda: guarded(frame.name), layer=path)]


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Moves the denominator of one division by `APART`, away from 0, while a graph is traced.

    Args:
        name: The name of the quotient's tensor.
    """
    own = {operator: getattr(tf.Tensor, operator) for operator in _OPERATORS}
    try:
        for operator, divide in own.items():
            setattr(tf.Tensor, operator, _guarded(divide, name, reflected=operator == "__rtruediv__"))
        yield
    finally:
        for operator, divide in own.items():
            setattr(tf.Tensor, operator, divide)


def _guarded(divide: Callable, name: str, *, reflected: bool) -> Callable:
    def guarded(one: Any, other: Any) -> Any:
        quotient = divide(one, other)
        if not tf.is_symbolic_tensor(quotient) or quotient.name != name:
            return quotient
        return divide(_moved(one, quotient.dtype), other) if reflected else divide(one, _moved(other, quotient.dtype))

    return guarded


def _moved(denominator: Any, dtype: tf.DType) -> tf.Tensor:
    denominator = tf.convert_to_tensor(denominator, dtype)
    apart = tf.cast(APART, dtype)
    return denominator + tf.where(denominator < 0, -apart, apart)
