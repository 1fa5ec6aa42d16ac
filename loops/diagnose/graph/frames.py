"""The measured output of one operation of a step, as plain values."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np


class Part(enum.Enum):
    """The part of a step to which an operation belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Frame:
    """One floating-point or complex tensor of a step, or an integer one of its batch.

    Attributes:
        name: The tensor's name, such as "dense/MatMul:0".
        kind: The type of its operation, such as "MatMul".
        dtype: The dtype, such as "float16".
        part: The part of the step that computed it.
        layer: The path of the layer that computed it, or None for the loss and the step itself.
        inputs: The names of the floating-point and complex tensors from which it was computed.
        amax: The largest magnitude, with infinity, without NaN; for complex values the larger of the two parts.
        has_nan: Whether it holds a NaN.
        source: "batch" or "variable" if it was not computed but read from there, else None.
        penalty: Whether a regularizer of the layer computed it.
        custom: The name of the function whose custom gradient computed it, or None.
        through: For a non-finite tensor, the names of the tensors behind its other inputs: those of a mask, variables
            that were not finite before the step, and the values that the step assigned to other variables.
        blind: Whether it is not finite and depends on what cannot be measured: a string, a table, an iterator.
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
        """Whether all of its values are finite."""
        return not self.has_nan and self.amax != float("inf")

    @property
    def problem(self) -> str:
        """Either "nan", if it holds a NaN, or "inf"."""
        return "nan" if self.has_nan else "inf"


def magnitude(values: Any) -> tuple[float, bool]:
    """The largest magnitude of an array, without NaN, and whether it holds a NaN.

    Args:
        values: A tensor or an array. Of complex numbers both parts count. The magnitude of an empty one is 0.
    """
    numbers = np.asarray(values).reshape(-1)
    if numbers.dtype.kind == "c":
        numbers = np.ascontiguousarray(numbers).view(numbers.real.dtype)
    # NumPy is slow with 16-bit floats, and float32 represents all of their values.
    narrow = numbers.dtype.itemsize <= 2
    sizes = np.abs(numbers.astype(np.float32 if narrow else np.result_type(numbers.dtype, np.float32)))
    return float(np.fmax.reduce(sizes, initial=0.0)), bool(np.isnan(np.max(sizes, initial=0.0)))
