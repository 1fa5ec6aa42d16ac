"""A run just before one of its steps, which can then be repeated any number of times."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.backend.generators import generators, set_generators
from loops.loop.loop import Loop
from loops.loop.state.resources import StepResources
from loops.record.log import difference
from loops.run.rewind.batches import Batches, Replayed, run_to_step
from loops.support.signals import deferred_signals


class Snapshot:
    """Copies of variables in the host's memory, bit for bit, and the states of the process's random generators.

    Args:
        variables: Variables on one device each, from `loops.backend.variables.components`.
        held: The step's tables and iterators.
        kernels: The argument of `loops.backend.generators.set_generators`: True if the step has random operations
            without a generator, so that they draw the same numbers each time.
        random: Whether the random generators are restored.
    """

    def __init__(
        self, variables: Iterable[tf.Variable], held: StepResources, *, kernels: bool = False, random: bool = True
    ):
        # A copy: NumPy may share the memory of the variable.
        self._saved = [(variable, np.array(variable.numpy())) for variable in variables]
        self._restore_held = held.snapshot()
        self._generators, self._kernels = generators() if random else None, kernels

    def restore(self) -> None:
        """Restores all of them."""
        for variable, value in self._saved:
            variable.assign(tf.constant(value, variable.dtype))
        self._restore_held()
        if self._generators is not None:
            set_generators(self._generators, kernels=self._kernels)


_BEFORE = 3
"""The number of batches before the step's that are also provided."""
START = "start"
"""The mark in the batches where the replay began."""
Undo = Callable[[], object]


class ReplayPoint:
    """The state before step N, the batch of step N, and its row in the log.

    The loop is in this state. A step with its variables changes them, and `reset` restores them. The loop cannot be
    used for anything else: its dataset has been read up to the batch after step N, and no action has acted.

    Args:
        loop: The loop, just before the step.
        snapshot: Returns a snapshot of everything that the step reads or writes.
        step: The step's number.
        start: The state at `began_at`.
        began_at: The step after which the replay began.
        batches: The loop's batches, with a mark `START` at `began_at`, read up to just before the step's.
        before: The batches of the steps before.
        rows: The log.

    Attributes:
        loop: The loop.
        train_step: The train step that the user gave to `Loop`.
        take: The function of one batch that `Loop` compiles: calls `train_step` with the batch or its parts.
        jit_compile: Whether `Loop` lets XLA compile it.
        step: N, counted from 1.
        batch: The batch of step N, as the dataset gave it.
        next_batch: The batch of step N+1, or None if there is none.
        before: The batches of up to three steps before N, oldest first; as many as were replayed.
        replicas: How many replicas share a batch.
        alone: False: all replicas take part.
        other_batch: "next": which batch `next_batch` is, seen from the step's.
        began_at: The step of the checkpoint that was restored, 0 for the beginning of the run.
        reproduced: Whether every repeated step, and step N, returned what the run's log has.
        comparable: Whether the log has any of these steps.
        differs: If not `reproduced`, a sentence: the first difference, or what could not be compared.
        logged: The log's row of step N, or None.
        rows: The complete log, one dict per line, by step.
    """

    def __init__(
        self,
        loop: Loop,
        snapshot: Callable[[], Snapshot],
        *,
        step: int,
        start: Snapshot,
        began_at: int,
        batches: Batches,
        before: list,
        rows: list[dict],
    ):
        self.loop, self.train_step = loop, loop.train_step
        self.take, self.jit_compile = loop.calls.train_step, loop.calls.jit_compile
        self.replicas = int(loop.identity({})["replicas"])
        self.alone, self.other_batch = False, "next"
        self.began_at, self.rows = began_at, rows
        self._start, self._batches, self._snapshot = start, batches, snapshot
        self._arrive(step, before)

    def _arrive(self, step: int, before: list) -> None:
        """Takes the step's batch, where the loop and its batches are just before the step."""
        self.step, self.before = step, before
        self.batch, self.next_batch = self._batches.next(), None
        with contextlib.suppress(tf.errors.OpError):  # An error of the next batch is not one of this step.
            self.next_batch = self._batches.next()
        self.logged = next((row for row in self.rows if row["step"] == step), None)
        self.reproduced, self.comparable = True, True
        self.differs: str | None = None
        self._here = self._snapshot()

    def compare(self, replayed: Replayed, why: Callable[[str], str]) -> None:
        """Says whether the repeated steps, and this one, returned what the run's log has.

        Args:
            replayed: The outputs of the repeated steps.
            why: From the first difference to what `differs` says.
        """
        if self.logged is not None:
            replayed[self.step] = self.outputs()
        found = difference(self.rows, replayed)
        if found is not None:
            self.reproduced, self.comparable, self.differs = False, found.known, why(found.sentence)

    def reset(self) -> None:
        """Restores every variable, and the process's random generators, to just before the step, bit for bit."""
        self._here.restore()

    @contextlib.contextmanager
    def at_checkpoint(self) -> Iterator[None]:
        """Inside, every variable is as it was at `began_at`."""
        self._start.restore()
        try:
            yield
        finally:
            self.reset()

    def outputs(self) -> dict[str, np.ndarray]:
        """The step's scalar outputs, compiled as the loop compiles it. Everything is restored afterwards."""
        try:
            return self.loop.calls.one(self.batch)
        finally:
            self.reset()

    def from_checkpoint(
        self, change: Callable[[Loop], Undo | None], steps_back: int | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Repeats the replayed steps and step N with something changed, then restores everything.

            def slower(loop):
                loop.train_step.optimizer.learning_rate = 1e-4

            [outputs["applied"] for outputs in point.from_checkpoint(slower)]

        Args:
            change: A function that takes the loop in the state before the first of these steps. It may assign
                variables, which are restored, and set Python attributes, such as `loop.train_step.clip_norm`: the step
                is traced again. It may return a function that undoes the latter.
            steps_back: How many steps before N to make the change; by default at `began_at`.

        Returns:
            The scalar outputs of each changed step, oldest first. The last are those of step N.

        Raises:
            scaler.InvalidArgument: If fewer steps were replayed.
            LoopError: If the dataset cannot go back.
        """
        replayed = self.step - 1 - self.began_at
        back = replayed if steps_back is None else steps_back
        if not isinstance(back, int) or not 0 <= back <= replayed:
            raise scaler.InvalidArgument(
                f"from_checkpoint(steps_back={steps_back!r}): step {self.step} was reached from step {self.began_at}: "
                f"expected an integer from 0 to {replayed}, or None."
            )
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(deferred_signals())
            stack.callback(self.reset)
            self._batches.go_back(START)
            self._start.restore()
            run_to_step(self.loop, self._batches, self.step - 1 - back, self.rows, signals)
            undo = change(self.loop)
            if undo is not None:
                stack.callback(undo)
            taken = tf.function(self.take, jit_compile=self.jit_compile or None)
            found = []
            for _ in range(back + 1):
                outputs = taken(self._batches.next())
                found.append({name: np.asarray(value) for name, value in outputs.items()})
                signals.act()
            return found

    def later_batches(self, last: int) -> Iterator[Any]:
        """The batches of the steps from N+1 to `last`; fewer at the end of the data.

        Raises:
            LoopError: If the dataset cannot go back.
        """
        for step, batch in self._batches_to(last):
            if step > self.step:
                yield batch

    def ahead(self, step: int) -> ReplayPoint:
        """This point, moved to just before a later step, with the steps before it as the run took them.

        Args:
            step: The number of the step, counted from 1.

        Raises:
            LoopError: If the dataset cannot go back.
            OutOfData: If it ends before the step.
        """
        held = (batch for _, batch in self._batches_to(step - 1))
        before = list(collections.deque(held, maxlen=batches_before(self.loop)))
        with deferred_signals() as signals:
            self._batches.go_back(START)
            self._start.restore()
            replayed = run_to_step(self.loop, self._batches, step - 1, self.rows, signals)
            earlier = self.differs
            self._arrive(step, before)
            self.compare(replayed, lambda said: earlier or f"{said[0].upper()}{said[1:]}.")
            signals.act()
        return self

    def _batches_to(self, last: int) -> Iterator[tuple[int, Any]]:
        """The numbers and the batches of the steps from where the replay began."""
        self._batches.go_back(START)
        for step in range(self.began_at + 1, last + 1):
            batch = self._batches.next()
            if batch is None:
                return
            yield step, batch


def batches_before(loop: Loop) -> int:
    """How many batches before the step's a `ReplayPoint` has: at least all of its window."""
    return max(_BEFORE, getattr(loop.train_step, "accumulate", 1) - 1)
