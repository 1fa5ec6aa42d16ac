"""Says of an error out of a user's step, or of the data, at which step of the run it came, and with what batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def note(error: Exception, name: str, step: int, element_spec: Any) -> None:
    """Adds a note to an error (PEP 678), whose own words and type stay. It adds a note once.

    Args:
        error: What was raised while the step was traced or taken.
        name: What the user calls the step.
        step: Its number in the run, from 1.
        element_spec: The shapes and dtypes of its batches, as far as they are known.
    """
    said = f"halfstep: this came at step {step} of the run, in {name}, with batches of {described(element_spec)}."
    notes = getattr(error, "__notes__", [])
    if said not in notes:
        vars(error)["__notes__"] = [*notes, said]  # `add_note` came with Python 3.11.


def described(element_spec: Any) -> str:
    """The shapes and dtypes of a batch in short, such as "(float32 [8, 3], int64 [8])"."""
    return str(tf.nest.map_structure(_Short, element_spec))


class _Short:
    """One part of a batch."""

    def __init__(self, spec: Any) -> None:
        shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
        self._text = type(spec).__name__
        if isinstance(shape, tf.TensorShape) and isinstance(dtype, tf.DType):
            self._text = f"{dtype.name} {'of any shape' if shape.rank is None else shape.as_list()}"

    def __repr__(self) -> str:
        return self._text
