"""What a loop counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from loops.step.user_steps import Found


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts since the loop was made, as Python integers. `scaler.Counters` are those of one loss scaler, as tensors.

    If a train step returns `attempted` and `applied`, the loop counts them. If it returns neither, the loop reads the
    loss scalers in its graph: a step in which one of them decided was attempted, and it was applied if none of them
    skipped. A step without a loss scaler is attempted and applied every time.

    Attributes:
        data: Batches taken from the dataset: calls of the train step. `Loop.run` counts in these.
        attempted: Steps on which a decision was taken: fewer than `data` if gradients are accumulated.
        applied: Attempted steps that moved the weights.
        known: False if `attempted` and `applied` cannot be determined and are not counted: the step returns neither,
            and multiplies by the loss scale of a scaler that it never updates.
    """

    data: int = 0
    attempted: int = 0
    applied: int = 0
    known: bool = True

    @property
    def skipped(self) -> int:
        """Attempted steps that changed nothing, because a gradient was not finite."""
        return self.attempted - self.applied


class CounterVariables(tf.Module):
    """The counts on the device: if a call of many steps fails, the steps that it finished are counted.

    Attributes:
        known: Whether the most recently traced step can be counted.
        compared: Whether its output `applied` is compared with what its loss scalers did.
    """

    def __init__(self) -> None:
        super().__init__(name="counters")
        self.data = _count("data")
        self.attempted = _count("attempted")
        self.applied = _count("applied")
        self.claimed = _count("claimed")
        self.denied = _count("denied")
        self.known = True
        self.compared = False

    def add(self, outputs: dict[str, tf.Tensor], found: Found, before: list) -> None:
        """Counts one call of a train step, once its outputs are computed.

        Args:
            outputs: What the step returned.
            found: The loss scalers in its graph.
            before: What `found.read()` returned before the step.
        """
        with tf.control_dependencies(list(outputs.values())):
            self.data.assign_add(1)
            self.known = found.known or "applied" in outputs
            if not self.known:
                return
            decided, moved = found.decided(before)
            here = decided > 0 if found.any else tf.constant(True)
            names = (name for name in ("attempted", "applied") if name in outputs)
            returned = {name: tf.cast(outputs[name], tf.bool) for name in names}
            attempted = tf.cast(
                returned.get("attempted", tf.logical_or(here, returned.get("applied", False))), tf.int64
            )
            whole = tf.cast(tf.equal(decided, moved), tf.int64)
            applied = tf.cast(returned.get("applied", attempted * whole), tf.int64)
            self.attempted.assign_add(attempted)
            self.applied.assign_add(applied)
            self.compared = "applied" in outputs and found.any
            if self.compared:
                all_skipped, all_applied = (decided > 0) & tf.equal(moved, 0), (moved > 0) & tf.equal(moved, decided)
                self.claimed.assign_add(tf.cast((applied > 0) & all_skipped, tf.int64))
                self.denied.assign_add(tf.cast((applied < attempted) & all_applied, tf.int64))

    def reset(self) -> None:
        """Counts from zero."""
        for variable in self.variables:
            variable.assign(0)

    def read(self) -> Counters:
        """The counts, on the host."""
        return Counters(int(self.data), int(self.attempted), int(self.applied), self.known)

    def numbers(self) -> tf.Tensor:
        """All counts as one tensor, int64 [5], for `read_from`."""
        return tf.stack([self.data, self.attempted, self.applied, self.claimed, self.denied])

    def read_from(self, numbers: Sequence[int]) -> tuple[Counters, str | None]:
        """Reads the value of `numbers` on the host.

        Returns:
            The counts; and a sentence if what the step returned as `applied` contradicts its loss scalers, else None.
        """
        data, attempted, applied, claimed, denied = (int(number) for number in numbers)
        says = None
        if self.compared and claimed:
            says = _CONTRADICTS.format(says="was applied", did="skipped it")
        elif self.compared and denied:
            says = _CONTRADICTS.format(says="was not applied", did="applied it")
        return Counters(data, attempted, applied, self.known), says


_CONTRADICTS = (
    "a train step returned an 'applied' that says that it {says}, but the loss scaler in it {did}: the loop counts "
    "what the step returns. Return outcome.finite of the step's own apply as 'applied', or leave it out, and the loop "
    "counts what the loss scalers do."
)


def _count(name: str) -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, name=name)
