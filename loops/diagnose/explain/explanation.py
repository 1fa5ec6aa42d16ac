"""What is known of a step: the answer of `halfstep explain`."""

from __future__ import annotations

import dataclasses

from loops.diagnose.explain.remedies import Remedy
from loops.diagnose.graph.literals import Literal
from loops.support.json_values import without_nan


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
        comparable: Whether there was something to compare with.
        finite_again: Whether the run's log says that the step was skipped, and taken again it is finite.
        verdict: "overflow", "floor", "loss", "backward", "too_large", "update" or "healthy".
        where: "data", "weights", "forward", "backward", or None: nothing is known, or the trail ends at what cannot be
            measured, such as a string, where `tensor` is what came out of it.
        layer: The path of the layer where it began, or None: the loss, or nothing.
        inside: Whether it began in the layer itself. Else it began in the loss or the step, in what came out of the
            layer or goes back to it.
        regularizer: Whether it began in the layer's regularizer, or in its gradient.
        custom_gradient: The name of the function with `tf.custom_gradient` in whose gradient it began, or None.
        tensor: The tensor where it began, or None.
        operation: The type of its operation, such as "MatMul", or None.
        line: "file.py:12", the line of Python that made it, or None.
        kind: "inf", "nan", or None.
        octaves_over: log2 of the true magnitude over the largest that the format holds, or None.
        fits_at: The largest power of two as a loss scale at which the step is finite, or None.
        flushed_at: A loss scale at which the step is finite only because what is not finite becomes zero in 16 bits, or
            None. It does not count as one that fits.
        applied: Whether the step was applied. With the verdict "loss" its gradients are finite, and its loss is not.
        applied_at: Of a skipped step whose loss is not finite, the largest power of two as a loss scale at which its
            gradients are finite, so that it is applied though its loss cannot be seen; or None.
        loss_scale: The step's.
        seen_at: The lower loss scale at which the step was looked at, since it is not finite at any and an overflow of
            its own scale would hide why; None for its own.
        attempted: Whether a decision was taken at it, which only the last micro-batch of a window does.
        example: Where the batch held it, the position of the first example that does; elsewhere of the first that makes
            the step fail by itself, where not all do. None where there is none, or it was not sought.
        literals: The constants of the layer that float16 cannot hold, where no loss scale helps.
        replicas: Of a run on several replicas, those whose share of the batch alone makes the step fail, counted from
            0; what is said is then about the first share. None on one device, or where nothing failed.
        blame: "batch", "weights", or None where another batch was not tried or the scale alone was to blame.
        grown_through: What made the weights go bad: "weight decay" or "learning rate", without which the steps since
            the checkpoint pass; None where neither is known to.
        learning_rates: Those before the steps that were taken again, and of this step, where the second is not finite
            or at least ten times the first; else None.
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
    comparable: bool = True
    finite_again: bool = False
    where: str | None = None
    layer: str | None = None
    inside: bool = True
    regularizer: bool = False
    custom_gradient: str | None = None
    tensor: str | None = None
    operation: str | None = None
    line: str | None = None
    kind: str | None = None
    octaves_over: float | None = None
    fits_at: float | None = None
    flushed_at: float | None = None
    applied: bool = False
    applied_at: float | None = None
    loss_scale: float | None = None
    seen_at: float | None = None
    attempted: bool = True
    example: int | None = None
    literals: tuple[Literal, ...] = ()
    replicas: tuple[int, ...] | None = None
    blame: str | None = None
    grown_through: str | None = None
    learning_rates: tuple[float, float] | None = None
    sentence: str = ""
    magnitudes: tuple[Magnitude, ...] = ()
    masked: tuple[str, ...] = ()
    observed_alike: bool = True
    remedies: tuple[Remedy, ...] = ()

    @property
    def scale_was_too_high(self) -> bool:
        """Whether nothing is wrong with the step but its loss scale: at a lower one of use, at least 1, it passes."""
        return self.verdict == "overflow" and self.fits_at is not None and self.fits_at >= 1.0

    def to_dict(self) -> dict:
        """As JSON has it: `where` is "pass", and numbers that JSON lacks are null."""
        found = dataclasses.asdict(self)
        found["pass"] = found.pop("where")
        found["literals"] = [
            {"value": one.before, "finding": one.said, "instead": one.instead} for one in self.literals
        ]
        return without_nan(found)
