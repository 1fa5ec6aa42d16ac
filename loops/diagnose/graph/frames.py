"""What one operation of a step gave, as plain values."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np


class Part(enum.Enum):
    """Where in a step an operation stands."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Frame:
    """One floating-point or complex tensor of a step, or an integer one of its batch.

    Attributes:
        name: The tensor's, such as "dense/MatMul:0".
        kind: Its operation's type, such as "MatMul".
        dtype: "float16" and so on.
        part: In which part of the step it was computed.
        layer: The path of the layer that computed it, or None: the loss, or the step itself.
        inputs: The names of the floating-point and complex tensors that it was computed from.
        amax: The largest magnitude, infinity included, NaN left out; of complex values, that of their two parts.
        has_nan: Whether a NaN is among its values.
        source: What it is where nothing computed it: "batch", "variable", or None.
        penalty: Whether a regularizer of the layer computed it.
        custom: The name of the function in whose custom gradient it was computed, or None.
        through: Where it is not finite, the names of what its other inputs came from: a mask's tensors, variables that
            were not finite before the step, and what the step had assigned to the others.
        blind: Whether it is not finite and came out of what cannot be measured: a string, a table, an iterator.
    """

    name: str
    kind: str
    dtype: str
    part: Part
    layer: str | None
    inputs: tuple[str, ...]
    amax: float
    has_nan: bool
    source: str | None = None
    penalty: bool = False
    custom: str | None = None
    through: tuple[str, ...] = ()
    blind: bool = False

    @property
    def finite(self) -> bool:
        """Whether all of its values are."""
        return not self.has_nan and self.amax != float("inf")

    @property
    def problem(self) -> str:
        """What is not finite in it: "nan" where it holds one, else "inf"."""
        return "nan" if self.has_nan else "inf"


def magnitude(values: Any) -> tuple[float, bool]:
    """The largest magnitude of an array's numbers, NaN left out, and whether it holds a NaN.

    Args:
        values: A tensor or an array; of complex numbers both parts count. Nothing is the largest of an empty one: 0.
    """
    numbers = np.asarray(values).reshape(-1)
    if numbers.dtype.kind == "c":
        numbers = np.ascontiguousarray(numbers).view(numbers.real.dtype)
    # NumPy is slow with 16 bits, and float32 holds all of their values.
    narrow = numbers.dtype.itemsize <= 2
    sizes = np.abs(numbers.astype(np.float32 if narrow else np.result_type(numbers.dtype, np.float32)))
    return float(np.fmax.reduce(sizes, initial=0.0)), bool(np.isnan(np.max(sizes, initial=0.0)))
