"""The custom gradients of a trace.

ops.custom_gradient.record   hands a custom gradient to the tape   absent: they have no layer and no name
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def around(change: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Within this context, changes the backward passes of functions with `tf.custom_gradient`.

    Args:
        change: Takes a function's name and its backward pass, and returns the backward pass to use.
    """
    try:
        from tensorflow.python.ops import custom_gradient

        record: Any = custom_gradient.record
        original = record.record_operation
    except (ImportError, AttributeError):
        yield
        return

    def recorded(name: str, outputs: Any, inputs: Any, backward: Callable, *rest: Any) -> Any:
        return original(name, outputs, inputs, change(name, backward), *rest)

    custom_gradient.record = types.SimpleNamespace(**{**vars(record), "record_operation": recorded})
    try:
        yield
    finally:
        custom_gradient.record = record
