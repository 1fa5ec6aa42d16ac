"""Writes an explanation as a few sentences."""

from __future__ import annotations

import math

from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.remedies import Kind
from loops.support.batches import MEND_LABELS

_KINDS = {"inf": "an infinity", "nan": "a NaN"}
_SOME = 3
"""So many columns are named."""


def describe(found: Explanation) -> str:
    """Describes what happened, how large the value was, and what helps, in that order."""
    parts = [
        _replayed(found),
        _observed(found),
        _what(found),
        _magnitude(found),
        _literals(found),
        _rate(found),
        _blame(found),
        _cure(found),
        _growth(found),
    ]
    return " ".join(part for part in parts if part)


def _replayed(found: Explanation) -> str:
    if found.reproduced:
        return ""
    if not found.comparable:
        return f"It is unknown whether the replay matches the run: {found.differs}"
    return f"The replay differs from the run: {found.differs} What follows is about the replay."


def _what(found: Explanation) -> str:
    at = f" at loss scale {found.loss_scale:g}" if found.loss_scale else ""
    if found.verdict == "healthy" and not found.attempted:
        return f"Step {found.step} is a micro-batch of a window, and its gradients are finite{at}.{_masked(found)}"
    if found.verdict == "healthy" and found.finite_again:
        return f"In the replay, step {found.step} was applied{at}: this does not show why the run skipped it."
    if found.verdict == "healthy" and found.retried:
        retries, scale = found.retried
        times = "once" if retries == 1 else f"{retries} times"
        return (
            f"Step {found.step} was applied at loss scale {scale:g}: its backward pass overflowed{at} and was retried "
            f"{times}. Nothing is wrong with it."
        )
    if found.verdict == "healthy" and not found.applied:
        return (
            f"Step {found.step} was not applied{at}, although its loss and the gradients of every loss scaler are "
            "finite: look at what else its output `applied` depends on."
        )
    if found.verdict == "healthy":
        return f"Step {found.step} was applied{at}: nothing is wrong with it.{_masked(found)}"
    if found.verdict == "zero":
        return f"{_zero(found, at)}{_masked(found)}"
    if found.applied:
        return _unseen(found, at)
    lower = f", and would be at {found.seen_at:g}" if found.seen_at else ""
    skipped = f"Step {found.step} was skipped{at}{lower}"
    if found.verdict == "too_large":
        return f"{skipped}: its gradients are finite, but unscaled they or their squared norm exceed float32."
    if found.verdict == "update":
        return f"{skipped}: {found.said or 'the optimizer turned finite gradients into non-finite values.'}"
    if found.verdict == "spike" and found.said:
        return f"{skipped} as a spike: {found.said}"
    if found.verdict == "spike":
        return f"{skipped} as a spike: {_spike(found)}. The batch, or the weights before it, are to be looked at."
    line = f", at {found.line}" if found.line else ""
    if found.where is None and found.tensor:
        return (
            f"{skipped}: {_KINDS[found.kind or 'inf']} was produced by {found.operation} {found.tensor!r}{line}. Where "
            "it began is unknown: the value comes from strings, a table, an iterator or a queue, which cannot be "
            "measured."
        )
    if found.where is None:
        return f"{skipped}: its gradients were not finite."
    return f"{skipped}: {_origin(found)}."


def _spike(found: Explanation) -> str:
    if found.spike is None:
        return "all was finite, and its norm, its loss or the norm of one gradient was above a limit of the SpikeGuard"
    name, value, limit = found.spike
    what = "the norm of its gradients" if name == "norm" else "its loss"
    return f"all was finite, and {what}, {value:g}, was above the limit of the SpikeGuard, {limit:g}"


def _zero(found: Explanation, at: str) -> str:
    what = "was applied" if found.attempted else "is a micro-batch of a window"
    if found.nonzero and found.nonzero_at is None:
        return (
            f"Step {found.step} {what}{at}, but its gradients are so small that their squares are zero in float32. Is "
            "the loss multiplied by a tiny weight?"
        )
    lost = f"Step {found.step} {what}{at}, but all of its gradients are zero, although its loss is not."
    if found.nonzero_at is None:
        return (
            f"{lost} A larger loss scale does not change that: look for a loss that does not depend on the weights "
            "here, such as a clipped one, or for units that give 0 for every example."
        )
    return (
        f"{lost} At a loss scale of {found.nonzero_at:g} {found.nonzero:,} of their values are not: 16 bits flush them "
        f"to zero. Use a larger loss scale, such as hs.Static({found.nonzero_at!r})."
    )


def _unseen(found: Explanation, at: str) -> str:
    what = "was applied" if found.attempted else "is a micro-batch of a window with finite gradients"
    why = f": {_origin(found)}" if found.where else ""
    return f"Step {found.step} {what}{at}, but its loss is not finite{why}."


def _origin(found: Explanation) -> str:
    if found.tensor is None:
        return began(found)
    line = f", at {found.line}" if found.line else ""
    return f"{began(found)} ({found.operation} {found.tensor!r}{line})"


def _masked(found: Explanation) -> str:
    if not found.masked:
        return ""
    count, first = len(found.masked), found.masked[0]
    which = f", first {first!r}" if count > 1 else f": {first!r}"
    return f" {count} of its tensors held infinities or NaN that had no effect{which}."


def began(found: Explanation) -> str:
    """What became non-finite first, and where, as a clause."""
    kind = _KINDS[found.kind or "inf"]
    place = _place(found)
    if found.empty:
        return f"the batch is empty, and what is computed over no example became {kind}, {place}"
    if found.label:
        value, classes = found.label
        where = "," if found.example is None else f" in example {found.example}, counted from 0,"
        return f"a label is {value}{where} but the model has {classes} classes, 0 to {classes - 1}"
    if found.where == "data":
        where = "" if found.example is None else f", first in example {found.example}"
        what = kind if found.operation == "Placeholder" else f"a value that became {kind} when it was cast to 16 bits"
        return f"the batch held {what}{where}"
    if found.where == "weights" and found.operation == "ReadVariableOp":
        return f"a weight held {kind} before the step, {place}"
    if found.where == "weights":
        return f"a weight held a value that became {kind} when it was cast to 16 bits, {place}"
    if found.operation == "Const" and found.kind == "nan":
        return f"a constant is NaN, {place}"
    if found.operation == "Const":
        return f"a constant that its format cannot hold became {kind}, {place}"
    return f"the {found.where} pass produced {kind} first {place}"


def _place(found: Explanation) -> str:
    if found.regularizer and found.layer:
        return f"in the {'' if found.inside else 'gradient of the '}regularizer of the layer {found.layer!r}"
    if found.custom_gradient:
        layer = f"the layer {found.layer!r}" if found.inside and found.layer else "the loss or the step itself"
        return f"in the custom gradient of {found.custom_gradient!r} in {layer}"
    return f"in the layer {found.layer!r}" if found.inside and found.layer else _outside(found)


def _outside(found: Explanation) -> str:
    if found.layer is None:
        return "outside of the model's layers, in the loss or the step itself"
    if found.where == "backward":
        return f"in the gradient of the output of the layer {found.layer!r}"
    return f"in the loss, where it uses the output of the layer {found.layer!r}"


def _magnitude(found: Explanation) -> str:
    parts = []
    if found.octaves_over is not None:
        parts.append(f"The true value is 2^{found.octaves_over:.1f} times the format's largest.")
    what = "That loss scaler" if found.other_scales else "It"
    if found.verdict == "overflow":
        parts.append(f"{what} passes at a loss scale of {found.fits_at:g}.")
    elif found.verdict == "floor":
        parts.append(f"{what} passes at a loss scale of {found.fits_at:g}, which is below the strategy's floor.")
    elif found.verdict == "backward":
        parts.append("It passes at no loss scale." if found.flushed_at is None else _flushed(found.flushed_at))
    elif found.verdict == "loss":
        parts.append(_loss(found))
    for scale, fits_at in found.other_scales:
        passes = "at no loss scale" if fits_at is None else f"at {fits_at:g}"
        parts.append(f"Another loss scaler, at {scale:g}, overflowed in the same step: it passes {passes}.")
    return " ".join(parts)


def _literals(found: Explanation) -> str:
    return " ".join(f"In {found.layer!r} {one.problem}. {one.instead}" for one in found.literals)


def _rate(found: Explanation) -> str:
    if found.learning_rates is None:
        return ""
    before, now = found.learning_rates
    since = f", and was {before:g} before the replayed steps" if math.isfinite(before) and before != now else ""
    return f"The learning rate of this step is {now:g}{since}: check its schedule."


def _growth(found: Explanation) -> str:
    """The last update, or what is known instead of it."""
    one = found.growth
    if one is None:
        return ""
    if one.moved is not None:
        rate = "" if one.learning_rate is None else f", at a learning rate of {one.learning_rate:g}"
        return (
            f"The last update before it, in step {one.step}, was {one.moved:.2g} times as large as the weights{rate}."
        )
    said = [] if one.largest is None else [f"the largest weight is {one.largest:.2g}"]
    said += [] if one.learning_rate is None else [f"the learning rate is {one.learning_rate:g}"]
    text = ", and ".join(said)
    return f"{text[:1].upper()}{text[1:]}."


def _flushed(scale: float) -> str:
    return f"No loss scale helps: at {scale:g} it passes only because these gradients become zero in 16 bits."


def _loss(found: Explanation) -> str:
    if found.empty or found.label:
        return ""
    hidden = "the model trains, but its loss cannot be seen: compute the loss in float32."
    if found.applied:
        return f"Its gradients are finite, so {hidden}"
    if found.applied_at is None:
        return "The loss itself is not finite, so no loss scale helps."
    return (
        "The loss itself is not finite at any loss scale. The gradients are finite at a loss scale of "
        f"{found.applied_at:g}: there the step is applied and {hidden}"
    )


def _blame(found: Explanation) -> str:
    blame = f"The weights had diverged before this step{_through(found)}." if found.blame == "weights" else ""
    if found.lost_weight:
        name, step = found.lost_weight
        since = f"already after step {step}" if step else "from the start"
        blame = f"The weight {name!r} was not finite {since}: look at what initialized or loaded it."
    if found.blame == "batch" or found.where == "data" or found.empty:
        blame = _batches(found)
    return " ".join(part for part in (_shares(found), _alone(found), _columns(found), blame) if part)


def _batches(found: Explanation) -> str:
    """What the trial of the next batch, or of the one before, says of this one."""
    if found.label:
        return (
            f"{MEND_LABELS} On a GPU and under XLA TensorFlow makes a NaN of such a label; on a CPU it raises an error."
        )
    if found.empty:
        return (
            "Keep empty batches out of the run, such as with dataset.filter(lambda x, y: tf.shape(x)[0] > 0), and look "
            "for what leaves no example."
        )
    other = f"The {found.other_batch} batch"
    if found.blame == "dataset":
        return f"{other} holds such values too: this is a fault of the dataset, not of one batch."
    another = next((one for one in found.remedies if one.kind is Kind.ANOTHER_BATCH and one.tried), None)
    if another is None:
        return "Check this batch." if found.blame == "batch" else ""
    if another.finite:
        return f"{other} passes with the same weights: check this batch."
    if found.blame == "batch":
        return f"{other} is finite, but fails too: check this batch, which is not the only fault."
    return f"{other} fails too."


def _columns(found: Explanation) -> str:
    if not found.columns:
        return ""
    named = [
        f"part {part!r}" if column is None else f"column {column} of part {part!r}" for part, column in found.columns
    ]
    more = f" and {len(named) - _SOME} more" if len(named) > _SOME else ""
    names = f"{', '.join(named[:_SOME])}{more}"
    verb = "is" if len(named) == 1 else "are"
    which = f"this batch or the {found.other_batch}" if found.blame == "dataset" else "this batch"
    return f"{names[0].upper()}{names[1:]}, counted from 0, {verb} not finite in any example of {which}."


def _through(found: Explanation) -> str:
    if found.grown_through == "weight decay":
        return " because of the weight decay: without it they do not diverge"
    if found.grown_through == "learning rate":
        return " because of large updates: at a lower learning rate they do not diverge"
    return ""


def _alone(found: Explanation) -> str:
    if found.example is None or found.where == "data":
        return ""
    return f"Example {found.example} of the batch, counted from 0, causes this alone."


def _shares(found: Explanation) -> str:
    if found.replicas is None:
        return ""
    if not found.replicas:
        return "No replica's share of the batch causes this alone."
    if len(found.replicas) == 1:
        return f"The share of the batch that replica {found.replicas[0]} takes, counted from 0, causes this alone."
    names = ", ".join(map(str, found.replicas))
    return f"The shares of the batch that the replicas {names} take, counted from 0, cause this, each alone."


def _observed(found: Explanation) -> str:
    if found.observed_alike:
        return ""
    return (
        "Reading every tensor changed the result, because TensorFlow then fuses fewer operations: the origin is "
        "uncertain."
    )


def _cure(found: Explanation) -> str:
    if found.verdict in ("healthy", "zero") or found.empty or found.label:
        return ""
    helping = [remedy for remedy in found.remedies if remedy.helps]
    if found.blame == "batch" and helping:
        helping = [one for one in helping if one.kind is not Kind.ANOTHER_BATCH]  # The blame says so.
        if not helping:
            return ""
    empty = "; ".join(f"{one.name}, since {one.why_not}" for one in found.remedies if one.why_not)
    empty = f" Finite, but no help: {empty}." if empty else ""
    if not helping:
        return f"Nothing that was tried helps.{empty}" if any(one.tried for one in found.remedies) else ""
    others = f" Also helped: {', '.join(one.name for one in helping[1:])}." if len(helping) > 1 else ""
    # A remedy trains on whatever the batch holds.
    helped = "If this batch is right, this helps" if found.blame == "batch" else "What helped"
    return f"{helped}: {helping[0].name}. {helping[0].advice}{others}{empty}"
