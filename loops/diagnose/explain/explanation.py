"""The explanation of a step, the answer of `halfstep explain`: its text, and its picture.

`sentences.txt` has the sentences, each under the condition on which it is said.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

import scaler
from loops.diagnose.explain.remedies import Kind, Remedy
from loops.diagnose.graph.literals import Literal
from loops.support.batches import MEND_LABELS
from loops.support.drawing import drawing, save
from loops.support.errors import LoopError
from loops.support.json_values import without_nan
from loops.support.palette import BLUE, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Label(NamedTuple):
    """A label outside of the classes, the first of a batch, and the number of classes that the model has."""

    value: int
    classes: int


@dataclasses.dataclass(frozen=True)
class Magnitude:
    """The largest magnitudes in a layer.

    Attributes:
        layer: The layer's path.
        forward: The largest magnitude of its output, NaN if the output holds one; None without an output.
        backward: The largest magnitude of its gradients, which carry the loss scale, likewise; None without gradients.
        dtype: The layer's compute dtype.
    """

    layer: str
    forward: float | None
    backward: float | None
    dtype: str


@dataclasses.dataclass(frozen=True)
class Growth:
    """The size of the last update before a step, or of the weights where that is unknown.

    Attributes:
        step: The step of the last update before; None where no step before was repeated.
        moved: The norm of that update over the norm of the weights before it; None where it is unknown.
        learning_rate: That of the update; where no step before was repeated, of the failed step. None without a Keras
            optimizer.
        largest: The largest magnitude among the weights before the failed step; None without weights.
    """

    step: int | None
    moved: float | None
    learning_rate: float | None
    largest: float | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a step was skipped, and what helps.

    Attributes:
        step: The number of the step, from 1; None for a run without steps.
        reproduced: Whether the replayed steps gave the values in the run's log.
        differs: How they differ, or why they cannot be compared; None if they agree.
        comparable: Whether there was a log to compare with.
        finite_again: Whether the run's log says that the step was skipped, but the replay is finite.
        verdict: "overflow", "floor", "loss", "backward", "too_large", "update", "spike", "zero", "unlogged" or
            "healthy". With "zero" the step was applied and its loss is not 0, but the norm of its gradients is. With
            "unlogged" the log shows nothing wrong, but steps are missing from it, of which some were skipped or may
            have been.
        where: "data", "weights", "forward" or "backward"; None if it is unknown, also because the trail ends at
            something that cannot be measured, such as a string. `tensor` is then what was computed from that.
        layer: The path of the layer where it began; None for the loss, or if it is unknown.
        inside: Whether it began in the layer itself. If False, it began in the loss or the step, which computes with
            the output of the layer or with its gradient.
        regularizer: Whether it began in the layer's regularizer, or in the gradient of that.
        custom_gradient: The name of the function with `tf.custom_gradient` whose gradient it began in, or None.
        tensor: The name of the tensor where it began, or None.
        operation: The type of the tensor's operation, such as "MatMul", or None.
        line: The line of Python that created the operation, such as "file.py:12", or None.
        kind: "inf", "nan", or None.
        octaves_over: log2 of the true magnitude over the format's largest value, or None.
        fits_at: The largest power of two as a loss scale at which the step is finite, or None.
        other_scales: If several loss scalers overflowed in the step, the loss scales of the others, each with the
            largest power of two at which its own gradients are finite, or None. `loss_scale` and `fits_at` are then of
            the first alone, and the step is applied where all of them fit.
        flushed_at: A loss scale at which the step is finite only because the non-finite gradients become zero in 16
            bits, or None. Such a scale does not count as one that fits.
        nonzero: With the verdict "zero", how many values of the gradients are not zero: at the step's own loss scale,
            if any is not, and else at `nonzero_at`. None for other verdicts.
        nonzero_at: With the verdict "zero", of the larger loss scales that were tried the one with the most non-zero
            values, if the step is finite there; else None.
        applied: Whether the step was applied. With the verdict "loss" its gradients are finite and its loss is not.
        applied_at: For a skipped step whose loss is not finite, the largest power of two as a loss scale at which its
            gradients are finite, so that it would be applied; or None.
        loss_scale: The loss scale of the step, None if it is unknown; of a step that was retried, that of its first
            backward pass.
        spike: With the verdict "spike" which number was too large, "norm" or "loss", that number and its limit, as the
            log says or else the replay; None for other verdicts, and if neither says it.
        retried: For an applied step, how often it was retried, and the loss scale at which it was applied, as the log
            says; None if it was not retried, or the log does not say.
        seen_at: The lower loss scale at which the step was measured. It is used if the step is finite at no scale, and
            an overflow caused by its own scale would hide the reason. None for its own scale.
        attempted: Whether the step decided on an update, as only the last micro-batch of a window does.
        example: The position of the first example that holds a non-finite value; or, if the batch holds none, of the
            first that makes the step fail alone, unless all do. None if there is none, or it was not searched.
        label: The label outside of the model's classes for which the loss is NaN, and the number of classes; None if
            that is not the reason.
        literals: The constants of the layer that float16 cannot hold, if no loss scale helps.
        replicas: On several replicas, those whose share of the batch alone makes the step fail, counted from 0. The
            explanation is then about the first share. None on one device, or if nothing failed.
        other_batch: Which batch was compared with that of the step: "next", or "previous" where the next was not yet
            read.
        blame: "batch" if the next batch passes, or if this one holds a value that is not finite and the next does not;
            "dataset" if both do; "weights" if they had diverged before, or one was never finite; or None.
        empty: Whether the batch holds no example, and the step failed for that: a mean over nothing is NaN.
        columns: The columns that are not finite in any example of the batch, nor, if the dataset is to blame, of the
            next: for each the key of its part in a batch of dicts, else its place in the batch, and its position along
            the part's last axis, which is None for a part of one value per example.
        grown_through: What made the weights diverge: "weight decay" or "learning rate", if the steps since the
            checkpoint pass without it; else None.
        learning_rates: Where an update was bad or the weights had diverged, the learning rate before the replayed
            steps, and that of this step, if the second is not finite or at least ten times the first; else None.
        lost_weight: The weight that was not finite already where the replay began, and after how many steps that was;
            None if it began elsewhere.
        growth: Where nothing helps, what speaks for an update that was too large: the last one before the step, beside
            the weights, and the learning rate; else None.
        said: What the step's loss scaler says of an update, or of the spike of one gradient, as a clause; else None.
        sentence: The explanation as text.
        magnitudes: The magnitudes of each layer, in the order of the forward pass.
        masked: The names of tensors that were not finite although the step was applied.
        observed_alike: Whether the step gave the same result while it was measured.
        remedies: The remedies that were tried, those that help first.
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
    other_scales: tuple[tuple[float, float | None], ...] = ()
    flushed_at: float | None = None
    nonzero: int | None = None
    nonzero_at: float | None = None
    applied: bool = False
    applied_at: float | None = None
    loss_scale: float | None = None
    spike: tuple[str, float, float] | None = None
    retried: tuple[int, float] | None = None
    seen_at: float | None = None
    attempted: bool = True
    example: int | None = None
    label: Label | None = None
    literals: tuple[Literal, ...] = ()
    replicas: tuple[int, ...] | None = None
    other_batch: str = "next"
    blame: str | None = None
    empty: bool = False
    columns: tuple[tuple[int | str, int | None], ...] = ()
    grown_through: str | None = None
    learning_rates: tuple[float, float] | None = None
    lost_weight: tuple[str, int] | None = None
    growth: Growth | None = None
    said: str | None = None
    sentence: str = ""
    magnitudes: tuple[Magnitude, ...] = ()
    masked: tuple[str, ...] = ()
    observed_alike: bool = True
    remedies: tuple[Remedy, ...] = ()

    @property
    def scale_was_too_high(self) -> bool:
        """Whether only the loss scale was wrong: the step passes at a lower scale that is at least 1."""
        return self.verdict == "overflow" and self.fits_at is not None and self.fits_at >= 1.0

    def to_dict(self) -> dict:
        """The explanation as values for JSON: `where` is named "pass", and NaN and infinities are None."""
        found = dataclasses.asdict(self)
        found["pass"] = found.pop("where")
        found["literals"] = [
            {"value": one.before, "finding": one.problem, "instead": one.instead} for one in self.literals
        ]
        found["label"] = None if self.label is None else self.label._asdict()
        return without_nan(found)


_SOME = 3
"""So many columns are named."""


def describe(found: Explanation) -> str:
    """Describes what happened, how large the value was, and what helps, in that order."""
    return " ".join(line for line in str(_said(found)).split("\n") if line.strip())


def began(found: Explanation) -> str:
    """What became non-finite first, and where, as a clause."""
    return str(_said(found).began()).strip()


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"f": format, "repr": repr, "is_finite": math.isfinite}
    return environment.get_template("sentences.txt")


def _said(found: Explanation) -> Any:
    """The sentences, with the lists of which they name the first."""
    columns = [
        f"part {part!r}" if column is None else f"column {column} of part {part!r}" for part, column in found.columns
    ]
    more = f" and {len(columns) - _SOME} more" if len(columns) > _SOME else ""
    tried = [] if found.verdict in ("healthy", "zero") or found.empty or found.label else found.remedies
    helping = [one for one in tried if one.helps]
    another = [one for one in found.remedies if one.kind is Kind.ANOTHER_BATCH and one.tried]
    return _template().make_module(
        {
            "e": found,
            "was": "was applied" if found.attempted else "is a micro-batch of a window",
            "columns": f"{', '.join(columns[:_SOME])}{more}",
            "mend_labels": MEND_LABELS,
            "another": another[0] if another else None,
            # That another batch passes is said where a batch is blamed.
            "helping": [one for one in helping if found.blame != "batch" or one.kind is not Kind.ANOTHER_BATCH],
            "nothing_helps": not helping and any(one.tried for one in tried),
            "no_help": [f"{one.name}, since {one.why_not}" for one in tried if one.why_not],
        }
    )


_MARKS = (("forward", -0.16, BLUE, "o", "output"), ("backward", 0.16, RED, "s", "gradients, scaled"))
"""The marks of each pass: the field, how far they are from the layer's line, and how they are drawn and named."""


def picture(found: Explanation, path: str | os.PathLike) -> None:
    """Draws an explanation into a file, a PNG, SVG or PDF by its name.

    Raises:
        LoopError: If matplotlib is not installed, or there is nothing to draw.
        NotWritable: If the file cannot be written.
    """
    save(magnitudes_figure(found), path)


def magnitudes_figure(found: Explanation) -> Figure:
    """The picture as a matplotlib Figure: the axis of magnitudes between a panel for zero and one for what is none."""
    if not found.magnitudes:
        raise LoopError("no magnitudes of the model's layers are known, so there is nothing to draw.")
    rows = found.magnitudes
    with drawing(2.1 + 0.32 * len(rows)) as figure:
        from matplotlib.lines import Line2D

        from loops.support.drawing import NARROW, range_legend

        figure.set_figwidth(NARROW)
        # A zero has no logarithm, and what is not finite no place on an axis.
        zero, axes, lost = figure.subplots(1, 3, sharey=True, width_ratios=(0.08, 1.0, 0.24))
        _number_line(axes, rows)
        _outside(zero, ["0"])
        _outside(lost, ["∞", "NaN"])
        # The gradients of a loss that is not finite tell nothing.
        marks = _MARKS[:1] if found.verdict == "loss" else _MARKS
        for field, shift, colour, shape, _ in marks:
            for place, value in enumerate(getattr(row, field) for row in rows):
                if value is not None:
                    panel, x = (zero, 0.0) if value == 0.0 else (lost, float(math.isnan(value)))
                    if _has_logarithm(value):
                        panel, x = axes, math.log2(value)
                    panel.plot([x], [place + shift], shape, color=colour, markersize=6, clip_on=False)
        labels = [f"▶ {row.layer}" if row.layer == found.layer else row.layer for row in rows]
        zero.set_yticks(range(len(rows)), labels, parse_math=False)
        zero.set_ylim(len(rows) - 0.5, -0.5)
        # The marks, and what the areas are.
        legend: dict[str, Any] = {
            name: Line2D([], [], color=colour, marker=shape, linestyle="") for *_, colour, shape, name in marks
        }
        legend |= range_legend()
        figure.legend([*legend.values()], [*legend], loc="outside lower left", ncols=2, fontsize=8)
        began = f", began in {found.layer!r}" if found.layer else ""
        figure.suptitle(f"Step {found.step}: {found.verdict}{began}", x=0.01, ha="left", fontsize=10, parse_math=False)
        return figure


def _number_line(axes: Any, rows: Sequence[Magnitude]) -> None:
    """The axis of powers of two around the range of float16 and all values, with that range's ends."""
    from matplotlib.ticker import MaxNLocator

    from loops.support.drawing import shade

    half = scaler.float_format("float16")
    values = [value for row in rows for value in (row.forward, row.backward) if value is not None]
    known = [math.log2(value) for value in values if _has_logarithm(value)]
    low = min([math.log2(half.smallest_subnormal) - 6, *(value - 2 for value in known)])
    high = max([math.log2(half.max) + 6, *(value + 2 for value in known)])
    shade(axes, low, high)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, place: f"$2^{{{value:.0f}}}$")
    axes.set_xlabel("largest magnitude in the layer")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=False)


def _outside(axes: Any, names: Sequence[str]) -> None:
    """A panel beside the axis, with a column for each name, in the colour of what float16 makes of a magnitude."""
    from loops.support.drawing import INFINITE, ZERO, tint

    tint(axes, -0.5, len(names) - 0.5, ZERO if names == ["0"] else INFINITE)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=names == ["0"])


def _has_logarithm(value: float) -> bool:
    return math.isfinite(value) and value > 0
