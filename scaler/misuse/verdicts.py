"""What is wrong with the gradients of a call, judged by their units: question after question, each with its sentence.

Variables that a loss does not reach: they have no gradient, and are never trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.graphs import is_eager
from scaler.errors import InvalidArgument
from scaler.misuse.carried import TO_APPLY
from scaler.misuse.marks import SCALED
from scaler.misuse.trace import kinds_behind, trace_here, units_of
from scaler.misuse.units import Mixed, Note, Power, Unit, Unknown, Why, sources_of
from scaler.weights.trainable import listed, name_of

NOT_SCALED = "not scaled"
"""The mistake of unscaled gradients."""
NEVER_ASKED = "neither scale(loss) (scale_loss of a LossScaleOptimizer) nor loss_scale was ever used"
_CLIPS = ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
_ONE_BY_ONE = (
    "Scale the sum of the losses once, or unscale the gradients of each loss by its own scaler and pass what you make "
    f"of them to {TO_APPLY}."
)
_STILL_SCALED = (
    "apply(grads, unscaled=True): these gradients come from a scaled loss, and nothing divided them by the loss "
    "scale since: they seem to be too large by this factor. Leave unscaled=True out, or pass the result of "
    "unscale(grads)."
)
_DIVIDED_AGAIN = (
    "apply(grads, unscaled=True): these gradients were divided by the loss scale more often than it multiplied their "
    "loss: they seem to be too small by this factor. Pass the result of unscale(grads) as it is, or divide only once "
    "by loss_scale."
)
_APPLIED_AGAIN = (
    "apply(grads): these gradients were applied to these variables already, in the same function: every step is taken "
    "and counted twice. Leave one call out. Where two optimizers take the same gradients on purpose, pass update=False "
    "to the first."
)
_COUNTED_AGAIN = (
    "apply(grads): another apply of this function has counted the step of this loss already. The step is counted "
    "several times: the scale grows too early, and one part may move while another is skipped. Give all parts to "
    "hs.apply_together, or pass update=False to each and call update(hs.Event(finite=...)) for all of them."
)
_COUNTED_IN_PART = (
    "apply(grads): one apply of this function counts the step of this loss, and another one with update=False takes "
    "other gradients of it: an overflow of those is never counted, and the scale does not fall. Give all optimizers to "
    "hs.apply_together, or pass update=False to each and call update(hs.Event(finite=...)) for all of them."
)


class Verdict(NamedTuple):
    """What is wrong.

    Attributes:
        sentence: In words.
        refuses: Whether the call is refused; else it is a warning.
        mistake: What it is about: a scaler says each once.
    """

    sentence: str
    refuses: bool
    mistake: str


def judge(
    method: str, units: Sequence[Unit], owner: object, wanted: frozenset, moves: bool, may_leave_out: bool
) -> Verdict | None:
    """The first thing that is known to be wrong with gradients which a scale is to divide, or None.

    Args:
        method: Who is given them.
        units: Theirs, without new values.
        owner: Whose scale divides them.
        wanted: The powers that they should have.
        moves: Whether the scale ever moves.
        may_leave_out: Whether another scaler may take what one branch gave, and this one the rest.
    """
    units = list(dict.fromkeys(units))
    powers = [unit for unit in units if isinstance(unit, Power)]
    mixed = [unit for unit in units if isinstance(unit, Mixed)]
    others = [unit for unit in powers if _is_foreign(unit, owner)]
    if powers and not mixed and not others and all(unit.powers == wanted for unit in powers):
        return None

    def refused(mistake: str, sentence: str) -> Verdict:
        return Verdict(f"{method}(grads): {sentence}", True, mistake)

    def warned(mistake: str, sentence: str) -> Verdict:
        return Verdict(f"{method}(grads): {sentence}", False, mistake)

    if others and not mixed and not any(unit.powers for unit in powers):
        return refused(
            "unscaled already",
            "these gradients went through unscale already, or were divided by loss_scale, and would be divided by the "
            f"loss scale again: expected gradients of the scaled loss. Pass unscaled gradients to {TO_APPLY}.",
        )
    scales = {one.owner for one in sources_of(units) if one.owner is not None}
    if scales and owner not in scales:
        return refused(
            "of another scaler",
            "another loss scaler scaled these gradients, but the scale of this one would divide them: expected "
            "gradients of a loss that this one scaled. Use one loss scaler for scale, unscale and apply.",
        )
    if others:
        return refused(
            "of several scalers",
            "this loss scaler scaled a part of these gradients. Others come from unscale, or from the loss of another "
            "loss scaler, and would be divided by a scale that they do not carry: expected gradients of losses that "
            f"this one scaled. {_ONE_BY_ONE}",
        )
    # Of a choice another call may take the other part.
    counted = {Why.SUM} if may_leave_out else {Why.SUM, Why.CHOICE}
    foreign = {unit.why for unit in mixed if any(_is_foreign(part, owner) for part in unit.of)} & counted
    if Why.CHOICE in foreign:
        return refused(
            "another scaler in a branch",
            "one branch of a tf.cond scales its loss with another loss scaler than the other branch. This scaler would "
            "divide the gradients of both: expected gradients of losses that this one scaled. Apply the gradients "
            "inside of the branch, by the scaler that scaled their loss.",
        )
    if Why.SUM in foreign:
        return refused(
            "a sum of scales",
            "a gradient is a sum of parts that carry different scales: of two loss scalers, or of one and none. No "
            f"single scale divides it: expected gradients of one scale. {_ONE_BY_ONE}",
        )
    parts = [part for unit in mixed if unit.why in counted for part in unit.of]
    for one in (*powers, *parts):
        if one.powers != wanted and (one.powers or Note.CANCELLED in one.notes):
            power = dict(one.powers).get(owner, 0.0)
            how = f"they grow with its power of {power:g}" if power else "they do not grow with it"
            return refused("another power", _not_proportional(how))
    reasons = {unit.why: unit.name for unit in reversed(mixed)}
    if Why.SIZE in reasons or Why.CURVE in reasons:
        return refused("by size", _not_proportional("they do not grow in proportion to it"))
    if moves and Why.LIMIT in reasons:
        function = next((f"tf.{one}" for one in _CLIPS if one in reasons[Why.LIMIT]), "a minimum or a maximum")
        return warned(
            "clipped while scaled",
            f"{function} limited these gradients while they carried the loss scale, so that the limit in effect is "
            "smaller by this factor and moves with it. Pass apply(..., clip_norm=...) instead, or clip what "
            f"unscale(grads) returns and pass them to {TO_APPLY}.",
        )
    unscaled = [unit for unit in powers if _is_unscaled_part(unit, moves)]
    of_model = any(Note.MODEL in unit.notes for unit in unscaled)
    is_one_right = bool(mixed) or any(unit.powers == wanted for unit in powers)
    if any(_is_unscaled_part(part, moves) for part in parts) or (of_model and is_one_right):
        return warned(
            "partly scaled",
            "the loss scale divides all of these gradients, but only a part of them comes from a scaled loss: the rest "
            "seem to be gradients of an unscaled loss or penalty, and would be too small by this factor. Pass the sum "
            "of all losses and penalties to scale(loss).",
        )
    # A user may scale by a constant.
    in_doubt = any(isinstance(unit, Unknown) for unit in units) or any(Note.NUMBER in unit.notes for unit in powers)
    if of_model and not in_doubt and len(unscaled) == len(powers):
        why = "nothing that they are computed from comes from scale(loss) or was multiplied by loss_scale"
        return warned(NOT_SCALED, not_scaled(why))
    return None


def still_scaled(units: Sequence[Unit], wanted: frozenset) -> str | None:
    """The warning for gradients that are passed as unscaled and are not, or None."""
    # A constant, an argument or a variable may be the scale that took it out again.
    doubts = {Note.NUMBER, Note.DOUBTFUL}
    carry = (unit for unit in units if isinstance(unit, Power) and unit.powers == wanted)
    return _STILL_SCALED if any(not unit.notes & doubts for unit in carry) else None


def divided_again(units: Sequence[Unit], owner: object) -> str | None:
    """The warning for gradients that are passed as unscaled and were divided once too often, or None."""
    # A constant, an argument or a variable may be the scale that multiplied them before.
    doubts = {Note.NUMBER, Note.DOUBTFUL}
    certain = (unit for unit in units if isinstance(unit, Power) and not unit.notes & doubts)
    return _DIVIDED_AGAIN if any(dict(unit.powers).get(owner, 0.0) < 0.0 for unit in certain) else None


def not_scaled(why: str) -> str:
    """The warning for gradients of an unscaled loss."""
    return (
        f"the gradients are divided by the loss scale, but {why}: they seem to be gradients of an unscaled loss, and "
        "the step would be too small by this factor. Differentiate scale(loss). If you scale by hand, read the factor "
        "from loss_scale. For no scaling use hs.NoScaling()."
    )


def _not_proportional(how: str) -> str:
    return (
        f"these gradients are not the loss scale times those of a loss: {how}. Something that is not proportional to "
        "the scaled loss was computed from it and differentiated, such as a square, a root, a logarithm, a product of "
        "two scaled losses or a limit: expected gradients of a scaled loss, or of sums and multiples of scaled losses. "
        "Compute the function first, and pass its result to scale(loss)."
    )


def _is_foreign(unit: Power, owner: object) -> bool:
    """Whether a gradient of this unit comes from `unscale`, or carries only the scales of others."""
    if not unit.powers:
        return Note.UNSCALED in unit.notes
    return owner not in [symbol for symbol, _ in unit.powers]


def _is_unscaled_part(unit: Power, moves: bool) -> bool:
    """Whether a gradient of this unit comes from an unscaled loss."""
    if unit.powers or unit.notes & {Note.UNSCALED, Note.CANCELLED, Note.DOUBTFUL}:
        return False
    # A constant factor may be the scale, if that never moves.
    return moves or Note.NUMBER not in unit.notes


def refuse_exchanged(loss: str, grads: Sequence[gradients.Gradient], owners: Mapping[str, object]) -> None:
    """Raises `InvalidArgument` if all scales that gradients carry are those of other losses.

    Args:
        loss: The name of the loss whose gradients they should be.
        grads: Gradients, or None.
        owners: The `Calls` that scaled each loss, by name.
    """
    units = units_of([gradients.values_of(grad) for grad in grads if grad is not None])
    scales = {one.owner for one in sources_of(units)}
    others = [name for name, owner in owners.items() if owner in scales]
    if others and loss not in others:
        raise InvalidArgument(
            f"apply: loss {loss!r} was given gradients of loss {' and '.join(map(repr, others))}, whose scale they "
            "carry: expected for each loss the gradients of its own scaled value."
        )


def refuse_scaled(loss: tf.Tensor) -> None:
    """Raises `InvalidArgument` for a loss that a scaler scaled, or that was multiplied by a scale by hand."""
    (unit,) = units_of([loss])
    if (isinstance(unit, Power) and unit.powers) or SCALED in kinds_behind([loss]):
        raise InvalidArgument(
            "scale(loss): the loss was scaled already, by this loss scaler or by another one: expected an unscaled "
            "loss. Its gradients would carry the product of both scales but be divided by only one. Call scale once, "
            "on the sum of all losses to differentiate."
        )


def counted_otherwise(grads: Sequence, variables: Sequence, loss_scale: tf.Tensor, counts: bool) -> str | None:
    """The warning for a step that several `apply` of this graph count more than once, or only in a part; or None.

    Args:
        grads: Gradients or None, one for each variable.
        variables: TensorFlow or Keras variables.
        loss_scale: What the gradients carry, which each scaling of a loss reads for itself.
        counts: Whether this call counts the step.
    """
    trace, graph = trace_here(), tf.compat.v1.get_default_graph()
    if trace is None:
        return None
    now = _of_steps([(grad, own) for grad, own in zip(grads, variables, strict=True) if grad is not None])
    here = [one for where, *one in trace.applied if where is graph]
    trace.applied.append((graph, now, loss_scale, counts))
    counted = frozenset[tuple]().union(*(taken for taken, _, counted in here if counted))
    if counts and set() < now <= counted:
        return _APPLIED_AGAIN
    alike = [(taken, counted) for taken, scale, counted in here if scale is loss_scale]
    if counts and any(counted for _, counted in alike):
        return _COUNTED_AGAIN
    left_out = any(not taken <= now for taken, _ in alike) if counts else any(counted for _, counted in alike)
    return _COUNTED_IN_PART if left_out and not (set() < now <= counted) else None


def _of_steps(pairs: list[tuple]) -> frozenset[tuple]:
    """What tells gradients of variables apart. An argument may stand for gradients that a benchmark repeats."""
    found = [(gradients.values_of(grad), own) for grad, own in pairs]
    return frozenset(
        (values.ref(), id(replicas.native(own)))
        for values, own in found
        if not is_eager(values) and values.op.type != "Placeholder"
    )


def without_gradient(grads: Sequence, variables: Sequence) -> str | None:
    """The sentence for variables without a gradient, or None if all that are not frozen have one, or none has.

    Args:
        grads: Gradients or None, one for each variable.
        variables: TensorFlow or Keras variables.
    """
    if all(grad is None for grad in grads):
        return None
    pairs = zip(grads, variables, strict=True)
    names = [name_of(own) for grad, own in pairs if grad is None and getattr(own, "trainable", True)]
    if not names:
        return None
    it, they_are, layer = ("it", "it is", "its layer") if len(names) == 1 else ("them", "they are", "their layers")
    return (
        f"there is no gradient for {listed(names)}: the loss does not depend on {it}, and {they_are} not trained. "
        f"Connect {it} with the loss, leave {it} out of the list, or set trainable=False on {layer}."
    )
