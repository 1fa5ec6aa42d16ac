"""Explains in one sentence what a step did and what would help."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from scaler.outcome.outcome import FIRST_PLACE, MOST_NAMES, Cause, Outcome


class Run(Protocol):
    """What knows more of the last skip than the scaler, such as a `loops.Loop`."""

    def why_skipped(self) -> str | None:
        """Why a step was skipped last; None if that is unknown."""


def explain(
    outcome: Outcome,
    names: Sequence[str],
    pinned: str = "",
    optimizer: str = "the optimizer",
    guard_clips: bool = False,
    weight: str | None = None,
    seen: bool = True,
) -> str:
    """Explains in one sentence what happened and what would help. It reads the outcome, so call it on the host.

    Args:
        outcome: From `LossScaler.apply`.
        names: The names of the variables in the order of the gradients, then those of the optimizer's own variables.
        pinned: Why the scale cannot go lower, and what to change. Empty if it can.
        optimizer: The name of the optimizer.
        guard_clips: Whether a `SpikeGuard` clips gradients to limits of their own before it judges the global norm.
        weight: The name of a weight that is not finite; empty if all are finite, None if nobody looked.
        seen: Whether the step looked at the values of its gradients, or knows their norms alone.
    """
    scale = f"{float(outcome.loss_scale):g}"
    why = Cause(int(outcome.cause))
    if why is Cause.NONE:
        retries = int(outcome.retries)
        after = f", after {retries} overflow{'s' * (retries > 1)} that {'were' if retries > 1 else 'was'} retried"
        applied = f"The step was applied at loss scale {scale}{after if retries else ''}."
        return applied if bool(outcome.finite) else "No step was attempted: it was not due."
    if math.isnan(float(outcome.loss_scale)):  # See `checks.scale_or_nan`.
        return (
            "The step was skipped because the loss_scale that it was given is no number from 2^-126 to 2^126, and "
            "gradients are divided by it. Pass what the loss was multiplied by."
        )
    if why is Cause.UPDATE:
        return _of_update(outcome, names, optimizer)
    if why is Cause.SPIKE:
        return _of_spike(outcome, names, guard_clips)
    where = _where(outcome, names, seen) + ("" if weight else _whose(outcome))
    if weight and bool(outcome.lower_helps):
        where += f"; the weight {weight!r} is already non-finite, but that is not why"
    elif weight:
        loss = ", and so is the loss" if why is Cause.LOSS else ""
        return (
            f"The step was skipped because the weight {weight!r} is already non-finite"
            f"{loss}; {where}. No loss scale can help: load earlier weights, and look for what assigned it."
        )
    return _SENTENCES[why].format(
        scale=scale,
        where=where,
        weights=", though all trained weights are" if weight == "" and int(outcome.count) else "",
        helps=_helps(outcome, pinned),
    )


def none_skipped(attempted: int, skipped: int) -> str:
    """What there is to say if the reason of the last skip is not known, by the counters."""
    if not attempted:
        return "No step was attempted yet."
    if not skipped:
        return f"No step was skipped yet: {attempted} of {attempted} attempted steps were applied."
    return (
        f"{skipped} of {attempted} steps {'was' if skipped == 1 else 'were'} skipped, the last through `update`, which "
        "does not know why. An `apply(hs.move_nothing, grads, variables, update=False)` before it judges the "
        "gradients and does know."
    )


def pinned(loss_scale: float, low: float, high: float, strategy: str) -> str:
    """Says why a strategy's scale cannot go below this one, and what to change. Empty if it can.

    Args:
        loss_scale: The scale.
        low: The least that the strategy may choose.
        high: The greatest.
        strategy: The strategy's name.
    """
    if loss_scale > low:
        return ""
    if low == high:
        return f"{strategy} keeps it at {low:g}: choose a lower one, or a strategy that lowers it"
    return f"{low:g} is the floor of {strategy}: set a lower min_scale"


_ATTEMPTS = 100
"""How many places are tried for a list of names before those of all others are forgotten."""


class Named(NamedTuple):
    """What sentences call one optimizer of a step, its variables, and its own values such as slots."""

    optimizer: str
    variables: tuple[str, ...]
    own: tuple[str, ...]


class Names:
    """The names of the variables that a scaler applies gradients to, by list.

    Attributes:
        lists: How many names each list has, by the place where it begins. The place follows from the names, so that it
            is the same in every process.
    """

    def __init__(self) -> None:
        self._forget()

    def __getstate__(self) -> dict:
        return {**vars(self), "_weights": {}}

    def _forget(self) -> None:
        self.lists: dict[int, int] = {}
        self._known: dict[tuple[Named, ...], int] = {}
        self._weights: dict[int, list[weakref.ref]] = {}
        self._unseen: set[int] = set()

    def begin(self, optimizers: Sequence[Named], weights: Sequence, seen: bool = True) -> int:
        """Adds the names of an `apply`, unless they are known, and returns the place where they begin.

        Args:
            optimizers: Mostly one.
            weights: The model's variables.
            seen: Whether a skip looks at the values of gradients: not in a step that selects.
        """
        key = tuple(optimizers)
        if key not in self._known:
            count = max(len(_listed(key)), 1)
            # Keras counts optimizers in the names of their slots, of all models: a place does not depend on them.
            place = self._free_place(tuple((one.optimizer, one.variables) for one in key), count)
            self._known[key] = place
            self.lists[place] = count
        place = self._known[key]
        self._weights[place] = list(map(weakref.ref, weights))
        (self._unseen.discard if seen else self._unseen.add)(place)
        return place

    def _free_place(self, key: tuple, count: int) -> int:
        for attempt in range(_ATTEMPTS):
            digest = hashlib.sha256(repr((attempt, key)).encode()).digest()
            place = FIRST_PLACE + int.from_bytes(digest[:8], "big") % max(MOST_NAMES - FIRST_PLACE - count, 1)
            if all(place + count <= begin or begin + many <= place for begin, many in self.lists.items()):
                return place
        self._forget()
        return place

    def explain(self, outcome: Outcome, pinned: str, guard_clips: bool, is_now: bool) -> str:
        """As the function, with the names of the list that the outcome is about.

        Args:
            outcome: As for the function.
            pinned: As for the function.
            guard_clips: As for the function.
            is_now: Whether no step was applied since. A skip moves no weight, so that all are as they were.
        """
        beginning = int(outcome.name_offset)
        names, optimizer = _listed(self.of(beginning)), _optimizer_of(self.of(beginning), int(outcome.index))
        looks = is_now and int(outcome.cause) in (Cause.LOSS, Cause.BACKWARD, Cause.OVERFLOW)
        weight = self._spoiled(beginning) if looks else None
        return explain(outcome, names, pinned, optimizer, guard_clips, weight, beginning not in self._unseen)

    def _spoiled(self, beginning: int) -> str | None:
        """The name of a weight that is not finite now, empty if all are, None if some are not there to look at.

        Those of the step come first. The weights of another optimizer may have spoiled its loss as well.
        """
        complete = beginning in self._weights
        for place in sorted(self._weights, key=lambda place: place != beginning):
            names = _listed(self.of(place))
            for position, weight in enumerate(reference() for reference in self._weights[place]):
                if weight is None:
                    complete = False
                elif not bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(weight)))):
                    return _name(names, position)
        return "" if complete else None

    def of(self, beginning: int) -> tuple[Named, ...]:
        """The optimizers whose names begin there; none if nobody knows them here."""
        return next((key for key, at in self._known.items() if at == beginning), ())


def _listed(optimizers: Sequence[Named]) -> list[str]:
    """All names in the order of positions: those of the variables, then the optimizers' own."""
    return [name for own in (False, True) for one in optimizers for name in (one.own if own else one.variables)]


def _optimizer_of(optimizers: Sequence[Named], index: int) -> str:
    """The name of the optimizer that `Skip.index` is about, for a cause of UPDATE."""
    owners = [one.optimizer for own in (False, True) for one in optimizers for _ in (one.own if own else one.variables)]
    if index < 0:
        # Each optimizer has a number for its learning rate and one for the limit of its clipping.
        owners, index = [one.optimizer for one in optimizers], (-1 - index) // 2
    return owners[index] if index < len(owners) else "the optimizer"


_UNKNOWN = "the variable is unknown in this process until it has traced the step that was skipped"
_SENTENCES = {
    Cause.LOSS: (
        "The step was skipped because the loss itself was not finite{weights}; {where}. No loss scale makes it finite: "
        "look for non-finite data, an empty batch, a label that the model has no class for, or a forward pass or "
        "penalty (activity_regularizer, add_loss) that overflows."
    ),
    Cause.BACKWARD: (
        "The step was skipped because no loss scale that was tried gives finite derivatives other than zero, though "
        "the loss is finite; {where}. Look for a square root, logarithm, division or norm at 0, or for weights that "
        "have grown."
    ),
    Cause.OVERFLOW: "The step was skipped because the backward pass overflowed at loss scale {scale}; {where}. {helps}",
    Cause.TOO_LARGE: (
        "The step was skipped because the gradients are finite at loss scale {scale}, but unscaled they or their "
        "squared norm exceed float32; {where}. No loss scale can help: lower the learning rate, or look for a loss "
        "that explodes."
    ),
}


def _of_update(outcome: Outcome, names: Sequence[str], optimizer: str) -> str:
    if int(outcome.index) < 0 and int(outcome.index) % 2 == 0:
        return (
            f"The step was skipped because the limit of the clipping for {optimizer} is not a positive finite number. "
            "Check the tensor passed to clip_norm, ClipByNorm or ClipByValue."
        )
    if int(outcome.index) < 0:
        return (
            f"The step was skipped because the learning rate of {optimizer} is NaN, infinite, so large that it can "
            "make weights infinite, or negative with a weight decay, although the gradients are finite. Look at the "
            "learning rate or its schedule."
        )
    value = "a NaN" if bool(outcome.has_nan) else "an infinity"
    unknown = int(outcome.name_offset) < 0
    first = f"; {_UNKNOWN}" if unknown else f", first in {_name(names, int(outcome.index))!r}"
    return (
        f"The step was skipped because {optimizer} turned finite gradients into {value}{first}; everything "
        "was rolled back. No loss scale can help: look at its epsilon and its slots, clip the gradients, or use "
        "another optimizer."
    )


def _of_spike(outcome: Outcome, names: Sequence[str], guard_clips: bool) -> str:
    place, beyond, unknown = int(outcome.index), int(outcome.count), int(outcome.name_offset) < 0
    name = _name(names, place)
    what, besides = "its loss", ""
    if place >= 0 and beyond:
        what = "the norm of the gradient of " + ("a variable" if unknown else repr(name))
        others = (
            f", and {beyond - 1} other{'s are' if beyond > 2 else ' is'} beyond {'theirs' if beyond > 2 else 'its'}"
        )
        besides = (others if beyond > 1 else "") + (f"; {_UNKNOWN}" if unknown else "")
    elif place >= 0:
        what = "the global norm of its gradients" + (", each clipped to its own limit," if guard_clips else "")
        besides = f"; {_UNKNOWN}" if unknown else f"; the gradient of {name!r} is the largest"
    limit, usual = float(outcome.limit), float(outcome.usual)
    fixed = math.isnan(usual)
    drawn = f"the limit of {limit:g} that SpikeGuard draws from a median of {usual:g} in the last steps"
    most, setting = (f"SpikeGuard's largest_norm, {limit:g}", "largest_norm") if fixed else (drawn, "the factor")
    return (
        f"The step was skipped because {what} is {float(outcome.value):g}, above {most}{besides}. The loss scale did "
        f"not move: look at the batch, or raise {setting} if such steps are sound."
    )


def _helps(outcome: Outcome, pinned: str) -> str:
    if bool(outcome.lower_helps):
        return f"A lower scale helps, but {pinned}." if pinned else "A lower scale helps."
    if pinned:
        return f"A lower scale may help, but {pinned}."
    return (
        "A lower scale may help; if it does not, look for non-finite data, or a square root, logarithm, division or "
        "norm at 0."
    )


def _where(outcome: Outcome, names: Sequence[str], seen: bool) -> str:
    first, count, nearest = int(outcome.index), int(outcome.count), int(outcome.nearest)
    if first < 0:
        return "the non-finite gradient was not recorded"
    if int(outcome.name_offset) < 0:
        return _UNKNOWN
    gradient = f"the gradient of {_name(names, first)!r}"
    if int(outcome.cause) == Cause.TOO_LARGE:
        return f"{gradient} is the first of {count} that are too large" if count > 1 else f"{gradient} is the largest"
    kind = "a NaN" if bool(outcome.has_nan) else "an infinity" if seen else "an infinity or a value above 2^64"
    if count <= 1:
        return f"{gradient} is the first with {kind}" + (", and the only one" if count else "")
    several = f"{gradient} is the first of {count} that are non-finite, with {kind} among them"
    if nearest < 0:
        return several
    return f"{several}, and that of {_name(names, nearest)!r} the last, usually the nearest to the loss"


def _whose(outcome: Outcome) -> str:
    replica = int(outcome.replica)
    if replica < 0:
        return ""
    return f", and of the replicas, counted from 0, {replica} is the first whose own are not finite"


def _name(names: Sequence[str], position: int) -> str:
    return names[position] if 0 <= position < len(names) else f"number {position}"
