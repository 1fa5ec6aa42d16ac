"""Explains a step that a run has just taken, in the process that trains, on the batch that the loop still holds."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.backend.generators import generators, set_generators
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.explain import explain_step
from loops.diagnose.explain.explanation import Explanation, describe
from loops.diagnose.graph.calls import recording_scaler_calls
from loops.diagnose.graph.changes import without_advice, without_windows
from loops.loop.calls import StepCalls, TrainStepFunction
from loops.loop.loop import Loop
from loops.loop.results import CounterVariables
from loops.loop.state.pipeline import operations_called
from loops.loop.state.resources import PYTHON, StepResources, kept_elsewhere, resources_of
from loops.loop.state.variables import variable_groups
from loops.loop.user_step import taking_batches
from loops.record.log import difference
from loops.run.rewind.replay_point import Snapshot
from loops.step.parts import OwnStep
from loops.step.user_steps import find
from loops.support.errors import LoopError
from loops.support.text import amount


class Recent(NamedTuple):
    """A step that a run has just taken.

    Attributes:
        step: Its number, from 1.
        batch: Its batch, as the dataset gave it.
        scales: The loss scale that it had, for each scaler for which it is known.
        logged: Its scalar outputs, or None if they are unknown.
        updates: How many updates the weights had since; None if that is unknown.
        rows: The outputs of the steps before it.
        before: The batches before it, oldest first; as many as are at hand.
        other: A batch to compare it with, or None.
        other_batch: Which one that is: "next" or "previous".
    """

    step: int
    batch: Any
    scales: Sequence[tuple[scaler.LossScaler, float]] = ()
    logged: Mapping[str, Any] | None = None
    updates: int | None = 0
    rows: Sequence[Mapping[str, Any]] = ()
    before: Sequence[Any] = ()
    other: Any = None
    other_batch: str = "next"


@contextlib.contextmanager
def at_hand(loop: Loop, recent: Recent) -> Iterator[StepAtHand]:
    """Puts a run back before a step that it has just taken; at the end everything is as it was.

    A skipped step leaves everything but the loss scale and the counters as it was. So the state now, with the loss
    scale of the step, is the state before it, unless later steps have moved the weights.

    Args:
        loop: The loop of the run, between two calls.
        recent: The step.

    Raises:
        LoopError: If the step keeps something that cannot be put back.
    """
    with warnings.catch_warnings(), without_advice():
        # The trace of the run itself has warned of everything in the step.
        warnings.simplefilter("ignore")
        random = generators() if _draws_alone(loop) else None
        point = StepAtHand(loop, recent)
        try:
            point.compare(recent)
            yield point
        finally:
            point.leave()
            if random is not None:
                set_generators(random, kernels=False)


class StepAtHand:
    """What a `ReplayPoint` is of a past run: the run just before a step, its batch, and its outputs.

    Its graphs are its own. Random operations that keep their position in a graph's kernel are therefore not moved in
    those of the run. On several workers the step is that of the first replica alone, without an update: it must not
    wait for the others.

    Args:
        loop: The loop of the run.
        recent: The step.

    Attributes:
        loop: What `Attempts` needs of a loop: `calls` and `element_spec`.
        train_step: The train step that the user gave to `Loop`.
        take: The function of one batch that is compiled.
        jit_compile: Whether XLA compiles it.
        step: The number of the step.
        batch: Its batch; on several workers the share of the first replica.
        next_batch: The batch to compare it with, or None.
        other_batch: Which one that is.
        before: The batches before it.
        replicas: How many replicas share `batch`.
        alone: Whether the step is taken without the other workers.
        began_at: The step before: nothing was replayed.
        reproduced: Whether it can be relied on that the step is as it was.
        comparable: Whether its outputs could be compared.
        differs: If not `reproduced`, why, as a sentence.
        logged: Its outputs in the run, or None.
        rows: The outputs of the steps before.
    """

    def __init__(self, loop: Loop, recent: Recent):
        self.alone = loop.workers.count > 1
        self.train_step, self.step, self.began_at = loop.train_step, recent.step, recent.step - 1
        self.replicas = 1 if self.alone else loop.replicas

        def share(batch: Any) -> Any:
            count = loop.replicas if self.alone else 1
            return tf.nest.map_structure(lambda part: part[: len(part) // count], batch) if count > 1 else batch

        self.batch, self.before = share(recent.batch), [share(one) for one in recent.before]
        self.next_batch = None if recent.other is None else share(recent.other)
        self.other_batch = recent.other_batch
        self.logged, self.rows = recent.logged, list(recent.rows)
        self.jit_compile = loop.calls.jit_compile
        self.take = taking_batches(loop.train_step, loop.element_spec) if self.alone else loop.calls.train_step
        self.loop = self._stand_in(loop)
        self.reproduced, self.comparable = True, True
        self.differs: str | None = None
        concrete = self.loop.calls.trace()
        held = resources_of(concrete)
        _check_can_be_put_back(concrete, held)
        groups = variable_groups(loop.train_step, concrete)
        variables = [one for group in groups.values() for one in group]
        self._now = Snapshot(variables, held, random=_draws_alone(loop))
        self._since = max(loop.counters.data - recent.step, 0) + 1
        self._scales = recent.scales
        self.reset()

    def reset(self) -> None:
        """Restores every variable, and the process's random generators, to just before the step."""
        self._now.restore()
        for scaling, value in self._scales:
            scaling.assign_scale(value)
        if isinstance(self.train_step, OwnStep):
            self.train_step.go_back(self._since)

    def at_checkpoint(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing: there is no earlier state."""
        return contextlib.nullcontext()

    def leave(self) -> None:
        """Restores them to what they were when this was made, bit for bit."""
        self._now.restore()

    def compare(self, recent: Recent) -> None:
        """Repeats the step as the run took it, and compares its outputs."""
        found = None
        if self.logged is not None and not self.alone:
            outputs = self.loop.calls.one(self.batch)
            self.reset()
            found = difference([self.logged], {self.step: outputs})
        said = [] if found is None else [found.sentence]
        if recent.updates is None:
            said.append("it is repeated with weights that may have moved since")
        elif recent.updates:
            said.append(f"it is repeated with weights that have moved since, by {amount(recent.updates, 'update')}")
        if said:
            self.reproduced, self.comparable = False, found is not None and found.known
            text = "; ".join(said)
            self.differs = f"{text[0].upper()}{text[1:]}."

    def _stand_in(self, loop: Loop) -> Any:
        spec = tf.nest.map_structure(tf.type_spec_from_value, self.batch)
        calls: Any = types.SimpleNamespace(scalers=list(loop.calls.scalers), trace=self._trace)
        if not self.alone:
            calls = StepCalls(
                loop.calls.train_step,
                spec,
                CounterVariables(),
                in_graph=False,
                endless=False,
                jit_compile=self.jit_compile,
                written=loop.train_step,
            )
        return types.SimpleNamespace(calls=calls, element_spec=spec)

    def _trace(self) -> tf.types.experimental.ConcreteFunction:
        """The step of one replica up to its gradients: its update waits for the other workers."""
        scalers = self.loop.calls.scalers
        with without_windows(self.train_step), recording_scaler_calls(scalers, moves=False):
            return tf.function(self.take).get_concrete_function(self.batch)


def _draws_alone(loop: Loop) -> bool:
    """Whether the process's random generators can be put back.

    If the dataset calls Python, its threads may draw from them in the meantime, and would draw the same numbers again.
    """
    dataset = loop.position.dataset
    return dataset is not None and not operations_called(dataset) & PYTHON


def _check_can_be_put_back(concrete: tf.types.experimental.ConcreteFunction, held: StepResources) -> None:
    kept = kept_elsewhere(concrete, held.called) or (["a table or an iterator"] if held.caveats else [])
    if kept:
        raise LoopError(
            f"the train step uses {', '.join(kept)}, with a state that cannot be put back in a run that goes on. "
            "`halfstep explain` repeats the step in a process of its own."
        )


def scalers_in(loop: Loop) -> list[scaler.LossScaler]:
    """The loss scalers that the step of a loop moves."""
    return loop.calls.scalers or list(find(loop.calls.trace()).scalers)


def explain_recent(loop: Loop, recent: Recent, seconds: float) -> Explanation:
    """Explains a step that a loop has just taken, and puts everything back.

    Args:
        loop: The loop, between two calls.
        recent: The step.
        seconds: After this time no further remedy is tried.
    """
    end = time.monotonic() + seconds
    with at_hand(loop, recent) as point:
        found = explain_step(Attempts(point, in_time=lambda: time.monotonic() < end))
        if not recent.scales:
            # It was repeated at the scale of today, and its own is not known.
            found = dataclasses.replace(found, loss_scale=None)
        said = [_of_first_share(found, scalers_in(loop)) if point.alone else describe(found)]
        if found.growth is not None and found.verdict != "update":
            said.append("Lower learning rates of earlier steps were not tried: `halfstep explain` repeats these steps.")
        if time.monotonic() >= end:
            said.append(f"Not everything was tried: the time of {amount(seconds, 'second', 'g')} was over.")
    return dataclasses.replace(found, sentence=" ".join(said))


def _of_first_share(found: Explanation, scalers: list[scaler.LossScaler]) -> str:
    if found.verdict == "healthy":
        reasons = " ".join(one.explain() for one in scalers if int(one.counters.consecutive_skips))
        return (
            f"Step {found.step} was skipped, but the share of the batch that replica 0 takes passes alone, up to its "
            f"gradients. {reasons}".rstrip()
        )
    return f"{describe(found)} Only the share of the batch that replica 0 takes was looked at."


def explain_batch(train_step: TrainStepFunction, batch: Any, *, seconds: float = 60.0) -> Explanation:
    """Explains the step that was just skipped, for a program that calls its train step by itself.

        outputs = train_step(batch)
        if not outputs["applied"]:
            print(loops.observe.explain_batch(train_step, batch).sentence)

    The step is repeated on its batch, at the loss scale that it had, and everything is put back bit for bit. A `Loop`
    does the same by itself with `loops.Explain()` among its actions.

    Args:
        train_step: What a `Loop` takes: a callable from a batch, or from its parts, to a dict of tensors. Its loss
            scaler must have skipped its last step, and the weights must be as that step left them.
        batch: The batch of that step. A list of parts is taken as a tuple.
        seconds: After this time no further remedy is tried. What is needed to say where it began takes its time.

    Raises:
        scaler.InvalidArgument: If no loss scaler of the step has skipped its last step.
        LoopError: If the step keeps something that cannot be put back, such as what Python keeps for it.
    """
    data = tf.data.Dataset.from_tensors(_with_tuples(batch)).repeat()
    loop = Loop(train_step, data, steps_per_call=1)
    scalers = scalers_in(loop)
    stuck = [one for one in scalers if int(one.counters.consecutive_skips)]
    if not stuck:
        raise scaler.InvalidArgument(
            "explain_batch(train_step): expected a step whose loss scaler has just skipped: call it right after a step "
            "that was not applied."
        )
    scales = [(one, float(one.last_skip.loss_scale)) for one in stuck]
    step = max(int(one.counters.attempted) for one in stuck)
    held = next(iter(data))
    return explain_recent(loop, Recent(step, held, scales, {"step": step, "applied": False}), seconds)


def _with_tuples(batch: Any) -> Any:
    """The batch with tuples for lists of parts, which a dataset would stack to one tensor."""
    if isinstance(batch, dict):
        return {key: _with_tuples(part) for key, part in batch.items()}
    if isinstance(batch, list) and any(hasattr(part, "shape") or isinstance(part, (dict, list)) for part in batch):
        return tuple(map(_with_tuples, batch))
    return batch
