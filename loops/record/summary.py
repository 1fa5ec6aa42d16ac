"""Summarizes a recorded run in a few numbers, and in a sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from loops.record.skips import Health, health, not_logged
from loops.record.steps import NO_STEPS, Recorded
from loops.support.part_names import columns_of
from loops.support.text import amount, share

_OF_SCALE = {"OVERFLOW", "unknown"}
"""Causes of the skips while a scale finds its level."""
_LAST = 10
"""The end of a run is the last of so many equal parts."""


class PartDigest(NamedTuple):
    """One part of a composed step in a few numbers, as in `Digest`; the end is the last tenth of its finite losses."""

    first_loss: float
    final_loss: float
    final_scale: float
    mean_log2_scale: float


@dataclasses.dataclass(frozen=True)
class Digest:
    """A recorded run in a few numbers.

    Attributes:
        steps: The number of recorded steps.
        attempts: The number of steps on which a decision was taken; in a log with decisions, that say which.
        skips: The number of skipped steps.
        by_cause: The number of skipped steps for each cause, the most frequent one first.
        first_loss: The first finite loss; NaN if there is none.
        final_loss: The mean of the finite losses of the last tenth of the run; NaN if there is none.
        unfinite_losses: The number of steps whose loss is not finite.
        final_scale: The last loss scale; NaN if none was recorded.
        mean_log2_scale: The mean of log2 of the loss scale; NaN if none was recorded.
        margin: The median of the octaves from the scale to the critical scale over the last tenth; NaN if unknown.
        health: Whether the skips are harmless.
        parts: The same of each part of a composed step, by its name; none for a step of one loss.
    """

    steps: int
    attempts: int
    skips: int
    by_cause: Mapping[str, int]
    first_loss: float
    final_loss: float
    unfinite_losses: int
    final_scale: float
    mean_log2_scale: float
    margin: float
    health: Health
    parts: Mapping[str, PartDigest]

    @property
    def skip_rate(self) -> float:
        """The share of the attempted steps that were skipped."""
        return self.skips / self.attempts if self.attempts else 0.0


def digest(run: Recorded) -> Digest:
    """A run in a few numbers."""
    loss, scale = run.column("loss"), run.column("loss_scale")
    finite = np.isfinite(loss)
    end = slice(len(run) - max(1, len(run) // _LAST), None)
    margin = run.margin[end]
    return Digest(
        steps=len(run),
        attempts=int((run.attempted & run.known).sum()),
        skips=int(run.skipped.sum()),
        by_cause={cause: len(steps) for cause, steps in run.causes.items()},
        **_ends(loss, scale),
        final_loss=_mean(loss[end][finite[end]]) if finite[end].any() else math.nan,
        unfinite_losses=int((~finite).sum()) if "loss" in run.columns else 0,
        margin=float(np.median(margin[~np.isnan(margin)])) if (~np.isnan(margin)).any() else math.nan,
        health=health(run if "applied" in run.columns else NO_STEPS, run.counted, traced=run.traced),
        parts={part: _of_part(run, part, name) for part, name in columns_of(run.columns, "loss").items() if part},
    )


def _mean(values: np.ndarray) -> float:
    """The mean of finite values, also of those whose sum is beyond float64."""
    with np.errstate(over="ignore"):
        mean = values.mean()
    return float(mean if np.isfinite(mean) else (values / len(values)).sum())


def _of_part(run: Recorded, part: str, loss: str) -> PartDigest:
    values = run.column(loss)
    finite = values[np.isfinite(values)]
    final = _mean(finite[-max(1, len(finite) // _LAST) :]) if len(finite) else math.nan
    return PartDigest(final_loss=final, **_ends(values, run.column(f"{part}/loss_scale")))


def _ends(loss: np.ndarray, scale: np.ndarray) -> dict[str, Any]:
    """What is computed alike for a whole run and for a part."""
    finite, usable = loss[np.isfinite(loss)], scale[np.isfinite(scale) & (scale > 0)]
    return {
        "first_loss": float(finite[0]) if len(finite) else math.nan,
        "final_scale": float(usable[-1]) if len(usable) else math.nan,
        "mean_log2_scale": float(np.log2(usable).mean()) if len(usable) else math.nan,
    }


def sentence(run: Recorded, found: Digest) -> str:
    """The result of a run in one sentence."""
    steps = amount(found.steps, "logged step" if found.health.thinned else "step")
    parts = [f"{_what(run)}: {steps}, {_skips(run, found)}"]
    if math.isfinite(found.first_loss) and math.isfinite(found.final_loss):
        parts.append(f"the loss went from {found.first_loss:.3g} to {found.final_loss:.3g}")
    elif math.isfinite(found.first_loss):
        parts.append(f"the loss began at {found.first_loss:.3g} and was not finite at the end")
    elif "loss" in run.columns:
        parts.append("the loss was never finite")
    for name, part in found.parts.items():
        if math.isfinite(part.first_loss):
            parts.append(f"the loss of {name} went from {part.first_loss:.3g} to {part.final_loss:.3g}")
    if found.health.unseen:
        parts.append(
            f"the loss of {found.health.unseen:,} of {found.health.moved:,} applied steps "
            f"({share(found.health.unseen / found.health.moved)}) is not finite, although the run trains"
        )
    if found.health.zeros:
        parts.append(
            f"the gradients of the last {found.health.zeros:,} applied steps have a norm of exactly zero, although "
            "their loss is not zero: halfstep explain tries a larger loss scale"
        )
    if math.isfinite(found.final_scale) and (run.column("loss_scale") != 1).any():
        parts.append(f"the loss scale ended at {number(found.final_scale)}{_above(found)}")
    for name, form in (("accuracy", "{:.1%} accuracy"), ("perplexity", "a perplexity of {:.4g}")):
        if isinstance(run.facts.get(name), (int, float)):
            parts.append(form.format(run.facts[name]))
    return " ".join(part for part in ("; ".join(parts) + ".", _of_data(run), not_logged(found.health)) if part)


def number(value: float) -> str:
    """A scale as text: a power of two other than 1 as such, as in 2^12."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent != 1 else f"{value:g}"


def _of_data(run: Recorded) -> str:
    """How many skips no loss scale causes, because the loss itself was not finite, as a sentence; empty for none."""
    unknown = (run.cause == "") & ~np.isfinite(run.column("loss")) & ("loss" in run.columns)
    steps = run.step[run.skipped & ((run.cause == "LOSS") | unknown)].tolist()
    if not steps:
        return ""
    skips = int(run.skipped.sum())
    some = f"{len(steps):,} of the {skips:,} skips" if len(steps) < skips else f"all {skips:,} skips"
    first = f"at step {steps[0]:,}" if len(steps) == 1 else f"first at step {steps[0]:,} and last at {steps[-1]:,}"
    return (
        f"The data or the forward pass caused {some if skips > 1 else 'the only skip'}, not the loss scale: the loss "
        f"itself was not finite, {first}."
    )


def _what(run: Recorded) -> str:
    facts = run.facts
    if not all(isinstance(facts.get(name), str) for name in ("task", "policy", "strategy")):
        return run.name
    return f"{run.name}, {facts['task']} in {facts['policy']} with {facts['strategy']}"


def _skips(run: Recorded, found: Digest) -> str:
    if "applied" not in run.columns:
        return "and the log does not say which were skipped"
    if not found.skips and found.health.thinned is not None and found.health.thinned.silent:
        return f"none of the {found.attempts:,} with a known decision skipped"
    if not found.skips:
        return "none skipped"
    if found.skips == found.attempts:
        if found.attempts == 1:
            return "the only attempt skipped"
        attempts = "of them" if found.attempts == found.steps else amount(found.attempts, "attempt")
        return f"all {attempts} skipped"
    of = "" if found.attempts == found.steps else f" of {amount(found.attempts, 'attempt')}"
    skipped = f"{found.skips:,}{of} skipped ({share(found.skip_rate)})"
    if found.skips == found.health.at_start and set(found.by_cause) <= _OF_SCALE:
        return f"{skipped} while the scale found its level"
    if not found.health.healthy:
        return f"{skipped}, with the last problem at step {found.health.step:,}"
    return skipped


def _above(found: Digest) -> str:
    if math.isnan(found.margin):
        return ""
    if found.margin <= 0:
        return ", at the largest scale that would have been finite" if found.margin == 0 else ", above what is finite"
    return f", {amount(found.margin, 'octave', '.3g')} below the largest that would have been finite"
