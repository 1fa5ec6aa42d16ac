"""A run just before one of its steps, which can be taken again and again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

import scaler
from loops.loop.loop import Loop
from loops.loop.state.held import Held
from loops.loop.state.randomness import generators, set_generators
from loops.run.rewind.advance import advance
from loops.run.rewind.batches import Batches
from loops.support.signals import deferred_signals


class Snapshot:
    """Copies of variables in the host's memory, bit for bit, and the state of the process's random generators.

    Args:
        variables: Each on one device, as `loops.loop.state.variables.components` gives them.
        held: The step's tables and iterators.
        kernels: As for `loops.loop.state.randomness.set_generators`: needed if a step has random operations without a
            generator, to have it draw the same numbers each time.
    """

    def __init__(self, variables: Iterable[tf.Variable], held: Held, *, kernels: bool = False):
        # NumPy may be given the memory of the variable itself.
        self._saved = [(variable, np.array(variable.numpy())) for variable in variables]
        self._restore_held = held.snapshot()
        self._generators, self._kernels = generators(), kernels

    def restore(self) -> None:
        """Puts all of them back."""
        for variable, value in self._saved:
            variable.assign(tf.constant(value, variable.dtype))
        self._restore_held()
        set_generators(self._generators, kernels=self._kernels)


START = "start"
"""The mark in the batches of where the replay began."""
Undo = Callable[[], object]


class Moment:
    """The state before step N, the batch of step N, and what the run wrote of it.

    The loop is in this state; a step taken with its variables moves them, and `reset` puts them back. The loop is used
    up: its dataset has been read to the batch after the step's, and none of its actions has acted.

    Args:
        loop: Just before the step.
        snapshot: Takes one of all that the step reads or writes.
        step: Its number.
        start: The state at `began_at`.
        began_at: Where the replay began.
        batches: With a mark `START` there, read to just before the step's.
        before: Batches of steps before.
        rows: The log.

    Attributes:
        loop: As given.
        train_step: As the user gave it to `Loop`.
        take: The function of one batch that `Loop` compiles: calls `train_step` with the batch or its parts.
        jit_compile: Whether `Loop` has XLA compile it.
        step: N, counted from 1.
        batch: Step N's, as the dataset gave it.
        next_batch: Step N+1's, or None if there is none.
        before: The batches of up to three steps before N, oldest first; as many as were replayed.
        replicas: How many replicas share a batch.
        began_at: The step of the checkpoint that was restored, 0 for the beginning of the run.
        reproduced: Whether every step that was taken again, and step N, returned what the run's log says.
        comparable: Whether the log has anything of these steps.
        differs: Where they are not `reproduced`, a sentence on why: the first difference, or what nobody can compare.
        logged: The log's row of step N, or None.
        rows: The whole log, a dict for each line, by step.
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
        self.step, self.began_at = step, began_at
        self.replicas = int(loop.identity({})["replicas"])
        self.before = before
        self.batch, self.next_batch = batches.next(), None
        with contextlib.suppress(tf.errors.OpError):  # It is not this step's.
            self.next_batch = batches.next()
        self.rows = rows
        self.logged = next((row for row in rows if row["step"] == step), None)
        self.reproduced, self.comparable = True, True
        self.differs: str | None = None
        self._start, self._batches = start, batches
        self._here = snapshot()

    def reset(self) -> None:
        """Puts every variable, and the process's random generators, back to just before the step, bit for bit."""
        self._here.restore()

    def outputs(self) -> dict[str, np.ndarray]:
        """What the step returns, compiled as the loop does it, as scalars. Everything is put back after it."""
        try:
            return self.loop.calls.one(self.batch)
        finally:
            self.reset()

    def from_checkpoint(
        self, change: Callable[[Loop], Undo | None], steps_back: int | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Takes the replayed steps and step N once more, with something changed, and puts everything back.

            def slower(loop):
                loop.train_step.optimizer.learning_rate = 1e-4

            [outputs["applied"] for outputs in moment.from_checkpoint(slower)]

        Args:
            change: Given the loop in the state before the first of these steps. It may assign variables, which are put
                back, and set attributes of Python, such as `loop.train_step.clip_norm`: the step is traced anew. To
                put those back it returns a function.
            steps_back: How many steps before N the change is made; from `began_at` on if not given.

        Returns:
            What each changed step returned, as scalars, oldest first. The last is step N's.

        Raises:
            scaler.InvalidArgument: If so many steps were not replayed.
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
            advance(self.loop, self._batches, self.step - 1 - back, signals)
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
