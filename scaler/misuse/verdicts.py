"""What is wrong with the gradients of a call, judged by their units: a list of predicates, each with its sentence.

Variables that a loss does not reach: they have no gradient, and are never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.errors import InvalidArgument
from scaler.misuse.carried import TO_APPLY
from scaler.misuse.marks import SCALED
from scaler.misuse.trace import kinds_behind, units_of
from scaler.misuse.units import Mixed, Note, Power, Unit, Unknown, Why, scales_of
from scaler.weights.trainable import listed, name_of


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


class Given(NamedTuple):
    """What a call was given.

    Attributes:
        method: Its name.
        units: Those of the gradients, without new values.
        owner: Whose scale divides them.
        wanted: The powers that they should have.
        moves: Whether the scale ever moves.
        may_leave_out: Whether another scaler may take what one branch gave, and this one the rest.
    """

    method: str
    units: Sequence[Unit]
    owner: object
    wanted: frozenset
    moves: bool = True
    may_leave_out: bool = False

    @property
    def counted(self) -> list[Unit]:
        """The units that are known and fit not every other one."""
        return [unit for unit in self.units if isinstance(unit, Power | Mixed)]

    @property
    def powers(self) -> list[Power]:
        """The powers among them."""
        return [unit for unit in self.counted if isinstance(unit, Power)]

    @property
    def mixed(self) -> list[Mixed]:
        """Those that are none."""
        return [unit for unit in self.counted if isinstance(unit, Mixed)]

    def is_right(self, unit: Unit) -> bool:
        """Whether a gradient of this unit is one of the loss times the scale."""
        return isinstance(unit, Power) and unit.powers == self.wanted

    def counts(self, unit: Mixed) -> bool:
        """Whether each part of a mixture should be right by itself."""
        # Another call may take the other choices.
        return unit.why is Why.SUM or (unit.why is Why.CHOICE and not self.may_leave_out)

    def is_foreign(self, unit: Unit) -> bool:
        """Whether a gradient of this unit comes from `unscale`, or carries only the scales of others."""
        if not isinstance(unit, Power):
            return False
        if not unit.powers:
            return Note.UNSCALED in unit.notes
        return self.owner not in {symbol for symbol, _ in unit.powers}

    def is_unscaled_part(self, unit: Unit) -> bool:
        """Whether a gradient of this unit is one of a loss that nobody scaled."""
        if not isinstance(unit, Power) or unit.powers or unit.notes & {Note.UNSCALED, Note.CANCELLED, Note.DOUBTFUL}:
            return False
        # A constant factor may be the scale, if that never moves.
        return self.moves or Note.NUMBER not in unit.notes


def judge(given: Given) -> Verdict | None:
    """The first thing that is known to be wrong with gradients which a scale is to divide, or None."""
    for mistake, refuses, is_wrong, sentence in _OF_SCALED:
        if is_wrong(given):
            return Verdict(f"{given.method}(grads): {sentence(given)}", refuses, mistake)
    return None


def still_scaled(given: Given) -> Verdict | None:
    """What is wrong with gradients that are passed as unscaled."""
    # A constant, an argument or a variable may be the scale that took it out again.
    doubts = {Note.NUMBER, Note.DOUBTFUL}
    if any(unit.powers == given.wanted and not unit.notes & doubts for unit in given.powers):
        return Verdict(_STILL_SCALED, False, _STILL_SCALED)
    return None


def refuse_exchanged(loss: str, grads: Sequence[gradients.Gradient], owners: Mapping[str, object]) -> None:
    """Raises `InvalidArgument` if all scales that gradients carry are those of other losses.

    Args:
        loss: The name of the loss whose gradients they should be.
        grads: Gradients, or None.
        owners: The `Calls` that scaled each loss, by name.
    """
    units = units_of([gradients.values_of(grad) for grad in grads if grad is not None])
    scales = frozenset().union(*map(scales_of, units))
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


def _unscaled_already(given: Given) -> bool:
    foreign = [unit for unit in given.powers if given.is_foreign(unit) and not unit.powers]
    return bool(foreign) and not any(unit.powers for unit in given.powers) and not given.mixed


def _of_another(given: Given) -> bool:
    scales = frozenset().union(*map(scales_of, given.units))
    return bool(scales) and given.owner not in scales


def _of_several(given: Given) -> bool:
    return any(map(given.is_foreign, given.powers))


def _in_another_branch(given: Given) -> bool:
    chosen = (unit for unit in given.mixed if unit.why is Why.CHOICE)
    return not given.may_leave_out and any(any(map(given.is_foreign, unit.of)) for unit in chosen)


def _sums_scales(given: Given) -> bool:
    return any(unit.why is Why.SUM and any(map(given.is_foreign, unit.of)) for unit in given.mixed)


def _is_another_power(given: Given) -> bool:
    return any(_power_is_wrong(given, unit) for unit in given.units)


def _power_is_wrong(given: Given, unit: Unit) -> bool:
    if isinstance(unit, Mixed):
        return given.counts(unit) and any(_power_is_wrong(given, part) for part in unit.of)
    if not isinstance(unit, Power) or given.is_right(unit):
        return False
    return bool(unit.powers) or Note.CANCELLED in unit.notes


def _how(given: Given) -> str:
    wrong = next(unit for unit in given.units if _power_is_wrong(given, unit))
    if isinstance(wrong, Mixed):
        wrong = next(part for part in wrong.of if _power_is_wrong(given, part))
    power = dict(wrong.powers).get(given.owner, 0.0) if isinstance(wrong, Power) else 0.0
    return f"they grow with its power of {power:g}" if power else "they do not grow with it"


def _not_proportional(how: str) -> str:
    return (
        f"these gradients are not the loss scale times those of a loss: {how}. Something that is not proportional to "
        "the scaled loss was computed from it and differentiated, such as a square, a root, a logarithm, a product of "
        "two scaled losses or a limit: expected gradients of a scaled loss, or of sums and multiples of scaled losses. "
        "Compute the function first, and pass its result to scale(loss)."
    )


def _goes_by_size(given: Given) -> bool:
    return any(unit.why in (Why.SIZE, Why.CURVE) for unit in given.mixed)


def _is_limited(given: Given) -> bool:
    return given.moves and any(unit.why is Why.LIMIT for unit in given.mixed)


def _limited(given: Given) -> str:
    name = next(unit.name for unit in given.mixed if unit.why is Why.LIMIT)
    function = next((f"tf.{one}" for one in _CLIPS if one in name), "a minimum or a maximum")
    return (
        f"{function} limited these gradients while they carried the loss scale, so that the limit in effect is smaller "
        "by this factor and moves with it. Pass apply(..., clip_norm=...) instead, or clip what unscale(grads) returns "
        f"and pass them to {TO_APPLY}."
    )


def _is_partly_scaled(given: Given) -> bool:
    if any(given.counts(unit) and any(map(given.is_unscaled_part, unit.of)) for unit in given.mixed):
        return True
    without = [unit for unit in given.powers if given.is_unscaled_part(unit) and Note.MODEL in unit.notes]
    return bool(without) and (any(map(given.is_right, given.powers)) or bool(given.mixed))


def _nobody_scaled(given: Given) -> bool:
    if any(isinstance(unit, Unknown) for unit in given.units) or not given.powers:
        return False
    # A user may scale by a constant.
    if any(Note.NUMBER in unit.notes for unit in given.powers):
        return False
    return all(map(given.is_unscaled_part, given.counted)) and any(Note.MODEL in unit.notes for unit in given.powers)


def not_scaled(why: str) -> str:
    """The warning for gradients of a loss that nobody scaled."""
    return (
        f"the gradients are divided by the loss scale, but {why}: they seem to be gradients of an unscaled loss, and "
        "the step would be too small by this factor. Differentiate scale(loss). If you scale by hand, read the factor "
        "from loss_scale. For no scaling use hs.NoScaling()."
    )


NOT_SCALED = "not scaled"
"""The mistake of gradients that nobody scaled."""
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
_Sentence = Callable[[Given], str]
_OF_SCALED: tuple[tuple[str, bool, Callable[[Given], bool], _Sentence], ...] = (
    (
        "unscaled already",
        True,
        _unscaled_already,
        lambda given: (
            "these gradients went through unscale already, or were divided by loss_scale, and would be divided by the "
            f"loss scale again: expected gradients of the scaled loss. Pass unscaled gradients to {TO_APPLY}."
        ),
    ),
    (
        "of another scaler",
        True,
        _of_another,
        lambda given: (
            "another loss scaler scaled these gradients, but the scale of this one would divide them: expected "
            "gradients of a loss that this one scaled. Use one loss scaler for scale, unscale and apply."
        ),
    ),
    (
        "of several scalers",
        True,
        _of_several,
        lambda given: (
            "this loss scaler scaled a part of these gradients. Others come from unscale, or from the loss of another "
            "loss scaler, and would be divided by a scale that they do not carry: expected gradients of losses that "
            f"this one scaled. {_ONE_BY_ONE}"
        ),
    ),
    (
        "another scaler in a branch",
        True,
        _in_another_branch,
        lambda given: (
            "one branch of a tf.cond scales its loss with another loss scaler than the other branch. This scaler would "
            "divide the gradients of both: expected gradients of losses that this one scaled. Apply the gradients "
            "inside of the branch, by the scaler that scaled their loss."
        ),
    ),
    (
        "a sum of scales",
        True,
        _sums_scales,
        lambda given: (
            "a gradient is a sum of parts that carry different scales: of two loss scalers, or of one and none. No "
            f"single scale divides it: expected gradients of one scale. {_ONE_BY_ONE}"
        ),
    ),
    ("another power", True, _is_another_power, lambda given: _not_proportional(_how(given))),
    ("by size", True, _goes_by_size, lambda given: _not_proportional("they do not grow in proportion to it")),
    ("clipped while scaled", False, _is_limited, _limited),
    (
        "partly scaled",
        False,
        _is_partly_scaled,
        lambda given: (
            "the loss scale divides all of these gradients, but only a part of them comes from a scaled loss: the rest "
            "seem to be gradients of an unscaled loss or penalty, and would be too small by this factor. Pass the sum "
            "of all losses and penalties to scale(loss)."
        ),
    ),
    (
        NOT_SCALED,
        False,
        _nobody_scaled,
        lambda given: not_scaled(
            "nothing that they are computed from comes from scale(loss) or was multiplied by loss_scale"
        ),
    ),
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
