"""What is known of a step: the answer of `halfstep explain`."""

from __future__ import annotations

import dataclasses

from loops.autopsy.remedies import Remedy
from loops.json_values import without_nan


@dataclasses.dataclass(frozen=True)
class Magnitude:
    """How large values were in a layer.

    Attributes:
        layer: Its path.
        forward: The largest magnitude of its output, NaN left out; None where it has none.
        backward: The largest magnitude of the gradients computed in it, which carry the loss scale; None without any.
        dtype: In which it computed.
    """

    layer: str
    forward: float | None
    backward: float | None
    dtype: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a step was skipped, and what helps.

    Attributes:
        step: Its number, from 1 on; None for a run of no steps.
        reproduced: Whether the replayed steps gave what the run's log says.
        differs: Where they did not, or why nobody can tell; None where they did.
        verdict: "overflow", "floor", "loss", "backward", "too_large", "update" or "healthy".
        where: "data", "weights", "forward", "backward", or None.
        layer: The path of the layer where it began, or None: the loss, or nothing.
        inside: Whether it began in the layer itself. Else it began in the loss or the step, in what came out of the
            layer or goes back to it.
        regularizer: Whether it began in the layer's regularizer, or in its gradient.
        tensor: The tensor where it began, or None.
        operation: The type of its operation, such as "MatMul", or None.
        line: "file.py:12", the line of Python that made it, or None.
        kind: "inf", "nan", or None.
        octaves_over: log2 of the true magnitude over the largest that the format holds, or None.
        fits_at: The largest power of two as a loss scale at which the step is finite, or None.
        loss_scale: The step's.
        seen_at: The lower loss scale at which the step was looked at, since it is not finite at any and an overflow of
            its own scale would hide why; None for its own.
        attempted: Whether a decision was taken at it, which only the last micro-batch of a window does.
        example: Where the batch held it, the position of the first example that does.
        replicas: Of a run on several replicas, those whose share of the batch alone makes the step fail, counted from
            0; what is said is then about the first share. None on one device, or where nothing failed.
        blame: "batch", "weights", or None where another batch was not tried or the scale alone was to blame.
        sentence: All that as text.
        magnitudes: In the order of the forward pass.
        masked: Tensors that were not finite though the step was applied.
        observed_alike: Whether the step did under observation what it does without.
        remedies: Those that help first.
    """

    step: int | None
    reproduced: bool
    differs: str | None
    verdict: str
    where: str | None = None
    layer: str | None = None
    inside: bool = True
    regularizer: bool = False
    tensor: str | None = None
    operation: str | None = None
    line: str | None = None
    kind: str | None = None
    octaves_over: float | None = None
    fits_at: float | None = None
    loss_scale: float | None = None
    seen_at: float | None = None
    attempted: bool = True
    example: int | None = None
    replicas: tuple[int, ...] | None = None
    blame: str | None = None
    sentence: str = ""
    magnitudes: tuple[Magnitude, ...] = ()
    masked: tuple[str, ...] = ()
    observed_alike: bool = True
    remedies: tuple[Remedy, ...] = ()

    def to_dict(self) -> dict:
        """As JSON has it: `where` is "pass", and numbers that JSON lacks are null."""
        found = dataclasses.asdict(self)
        found["pass"] = found.pop("where")
        return without_nan(found)
