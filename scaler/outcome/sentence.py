"""Explains in one sentence what a step did and what would help."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from scaler.outcome.last_skip import LAST_REPLICA, MOST_COUNTED, MOST_NAMES
from scaler.outcome.outcome import Cause, Outcome


def explain(outcome: Outcome, names: Sequence[str], pinned: str = "", optimizer: str = "the optimizer") -> str:
    """Explains in one sentence what happened and what would help. It reads the outcome, so call it on the host.

    Args:
        outcome: From `LossScaler.apply`.
        names: The names of the variables in the order of the gradients, then those of the optimizer's own variables.
        pinned: Why the scale cannot go lower, and what to change. Empty if it can.
        optimizer: The name of the optimizer.
    """
    scale = f"{float(outcome.loss_scale):g}"
    why = Cause(int(outcome.cause))
    if why is Cause.NONE:
        applied = bool(outcome.finite)
        return f"The step was applied at loss scale {scale}." if applied else "No step was attempted: it was not due."
    if why is Cause.UPDATE:
        return _of_update(outcome, names, optimizer)
    where, weight = _where(outcome, names) + _whose(outcome), int(outcome.weight)
    if weight >= 0 and bool(outcome.lower_helps):
        where += f"; the weight {_name(names, weight)!r} is already non-finite, but that is not why"
    elif weight >= 0:
        loss = ", and so is the loss" if why is Cause.LOSS else ""
        return (
            f"The step was skipped because the weight {_name(names, weight)!r} is already non-finite"
            f"{loss}; {where}. No loss scale can help: load earlier weights, and look for what assigned it."
        )
    return _SENTENCES[why].format(
        scale=scale,
        where=where,
        weights=", though all trained weights are" if int(outcome.count) else "",
        helps=_helps(outcome, pinned),
    )


class Names:
    """The names of the variables that a scaler applies gradients to, in one list for all its `apply`.

    Attributes:
        beginnings: Where the names of each list of variables begin, in order.
    """

    def __init__(self) -> None:
        self._forget()

    def __getstate__(self) -> dict:
        return {**vars(self), "_weights": {}}

    def _forget(self) -> None:
        self.beginnings: list[int] = []
        self._known: dict[tuple[str, tuple[str, ...]], int] = {}
        self._weights: dict[int, list[weakref.ref]] = {}
        self._count = 0

    def begin(self, names: Sequence[str], optimizer: str, weights: Sequence = ()) -> int:
        """Adds the names of an `apply`, unless they are known, and returns where they begin.

        Args:
            names: Of its variables.
            optimizer: Its name.
            weights: The model's variables, if the step does not look at them itself when it skips.
        """
        key = optimizer, tuple(names)
        if self._count + len(names) > MOST_NAMES:
            self._forget()
        if key not in self._known:
            self._known[key] = self._count
            self.beginnings.append(self._count)
            self._count += max(len(names), 1)
        self._weights[self._known[key]] = list(map(weakref.ref, weights))
        return self._known[key]

    def spoiled(self, beginning: int) -> int:
        """The position of the first weight that is not finite now, -1 if there is none or the step looked itself."""
        for position, weight in enumerate(reference() for reference in self._weights.get(beginning, ())):
            if weight is not None and not bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(weight)))):
                return position
        return -1

    def of(self, beginning: int) -> tuple[Sequence[str], str]:
        """The names that begin there, and the name of their optimizer."""
        found = [(names, optimizer) for (optimizer, names), at in self._known.items() if at == beginning]
        return found[0] if found else ((), "the optimizer")


_SENTENCES = {
    Cause.LOSS: (
        "The step was skipped because the loss itself was not finite{weights}; {where}. No loss scale makes it finite: "
        "look for non-finite data, or a forward pass that overflows."
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
    if int(outcome.index) == -2:
        return (
            "The step was skipped because the limit of the clipping is not a positive finite number. Check the "
            "tensor passed to clip_norm, ClipByNorm or ClipByValue."
        )
    if int(outcome.index) < 0:
        return (
            f"The step was skipped because the learning rate of {optimizer} is NaN, infinite or so large that it can "
            "make weights infinite, although the gradients are finite. Look at the learning rate or its schedule."
        )
    value = "a NaN" if bool(outcome.has_nan) else "an infinity"
    name = _name(names, int(outcome.index))
    return (
        f"The step was skipped because {optimizer} turned finite gradients into {value}, first in {name!r}; everything "
        "was rolled back. No loss scale can help: look at its epsilon and its slots, clip the gradients, or use "
        "another optimizer."
    )


def _helps(outcome: Outcome, pinned: str) -> str:
    if bool(outcome.lower_helps):
        return f"A lower scale helps, but {pinned}." if pinned else "A lower scale helps."
    if pinned:
        return f"A lower scale may help, but {pinned}."
    return "A lower scale may help; if it does not, look for a square root, logarithm, division or norm at 0."


def _where(outcome: Outcome, names: Sequence[str]) -> str:
    first, count, nearest = int(outcome.index), int(outcome.count), int(outcome.nearest)
    if first < 0:
        return "the non-finite gradient was not recorded"
    number = f"{MOST_COUNTED} or more" if count >= MOST_COUNTED else str(count)
    gradient = f"the gradient of {_name(names, first)!r}"
    if int(outcome.cause) == Cause.TOO_LARGE:
        return f"{gradient} is the first of {number} that are too large" if count > 1 else f"{gradient} is the largest"
    kind = "a NaN" if bool(outcome.has_nan) else "an infinity"
    if count <= 1:
        return f"{gradient} is the first with {kind}" + (", and the only one" if count else "")
    several = f"{gradient} is the first of {number} that are non-finite, with {kind} among them"
    if nearest < 0:
        return several
    return f"{several}, and that of {_name(names, nearest)!r} the last, usually the nearest to the loss"


def _whose(outcome: Outcome) -> str:
    replica = int(outcome.replica)
    if replica < 0 or int(outcome.weight) >= 0:
        return ""
    later = " or a later one" if replica >= LAST_REPLICA else ""
    return f", and of the replicas, counted from 0, {replica}{later} is the first whose own are not finite"


def _name(names: Sequence[str], position: int) -> str:
    return names[position] if 0 <= position < len(names) else f"number {position}"
