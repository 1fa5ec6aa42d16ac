"""What one operation of a step gave, as plain values."""

from __future__ import annotations

import dataclasses
import enum


class Part(enum.Enum):
    """Where in a step an operation stands."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Frame:
    """One floating-point tensor of a step.

    Attributes:
        name: The tensor's, such as "dense/MatMul:0".
        kind: Its operation's type, such as "MatMul".
        dtype: "float16" and so on.
        part: In which part of the step it was computed.
        layer: The path of the layer that computed it, or None: the loss, or the step itself.
        inputs: The names of the floating-point tensors that it was computed from.
        amax: The largest magnitude, infinity included, NaN left out.
        has_nan: Whether a NaN is among its values.
        source: What it is where nothing computed it: "batch", "variable", or None.
        penalty: Whether a regularizer of the layer computed it.
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

    @property
    def finite(self) -> bool:
        """Whether all of its values are."""
        return not self.has_nan and self.amax != float("inf")

    @property
    def problem(self) -> str:
        """What is not finite in it: "nan" where it holds one, else "inf"."""
        return "nan" if self.has_nan else "inf"
