"""The outer loop: take steps, visit the host, let the actions act."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

import scaler
from loops.backend.generators import caveats as hidden_generators
from loops.loop import failed_step, kept_batches
from loops.loop.calls import StepCalls, TrainStepFunction
from loops.loop.compilation import has_steady_rows
from loops.loop.failed_step import END, why_endless_data_ended, why_out_of_data
from loops.loop.results import CallResult, Counters, CounterVariables, Outputs, scalars_and_vectors
from loops.loop.silence import Checks, warn_if_most_were_skipped
from loops.loop.state.actions import ActionStates
from loops.loop.state.compared import Resumed
from loops.loop.state.described import identity, settings
from loops.loop.state.position import Position, SourcePosition, position_in
from loops.loop.state.resources import StepResources, caveats_of_kernels, resources_of
from loops.loop.state.state import RunState
from loops.loop.state.variables import trainable_flags, variable_groups
from loops.loop.user_step import check_arguments, check_batches, replicate, taking_batches
from loops.loop.visit import Action, Pace, Visit
from loops.loop.workers import Workers, meet
from loops.step.train_step import TrainStep
from loops.step.user_steps import named_by
from loops.support.batches import bad_batch
from loops.support.errors import OutOfData, check_count
from loops.support.run_locks import RunLocks
from loops.support.signals import Deferred, deferred_signals
from loops.support.written import enter, named, place_of


class Loop:
    """Runs a train step over a dataset.

        loop = loops.Loop(train_step, dataset, steps_per_call=100, actions=[loops.Progress()])
        loop.run(10_000)

    Each call of the inner loop takes `steps_per_call` steps without talking to the host. Then the host reads their
    outputs, once, and calls every action with them. An action is any callable that takes a `Visit`. If it is also a
    context manager, it is entered when `run` begins and left when it ends, however it ends. If one action raises, the
    others still act, then `run` raises its error. An action may have these methods: `begin(loop)`, called before the
    first step and before any action is entered; `end()`, called after the last step, unless a step raised;
    `nothing_to_do(done, goal, why)`, called if a run has no step to take, because it is at its goal or, with a sentence
    `why`, because an action ended it before;
    `save_state()` and `load_state(value)`, see `Checkpoint`. An action that sets its attribute `stopped` to a sentence
    ends the run, as if its goal were reached.

    Only one run at a time may write a file or folder. Writers lock theirs while `run` is running. A second run that
    would write the same is refused, with the process that holds the lock. The lock ends with that process. Readers need
    none.

    The loop watches the loss scalers in the graph of the train step and its attribute `loss_scaler`: after the actions
    of each visit it calls their `check()`, which raises `scaler.StuckError` after too many skips. An action with a
    method `why_skipped() -> str | None` adds a sentence to it. The first step that was applied although its loss is not
    finite is named in a `scaler.ScaleWarning`.

    SIGINT (Ctrl-C) and SIGTERM wait for the end of the call, also while the step is traced, an action acts or a
    checkpoint is written: the actions see its steps, a `Checkpoint` saves, then `run` raises KeyboardInterrupt for
    SIGINT, and SystemExit with status 143 for SIGTERM. After that, or after an error in the middle of a call,
    everything is as after the last finished step, and `run` can go on; only BatchNorm's statistics and seed generators
    may have seen the batch whose forward pass raised. The finished steps of a call that failed, also where the dataset
    raised, are counted, but no action sees them: the error names them, and they are missing from logs and traces.

    On several workers, processes that each run the same program with a strategy from `join_workers`, all read the same
    batches and are at the same step at each visit. A signal to one worker, an action that stops the run or an error
    ends all workers at the same visit, after a save. Actions whose attribute `chief_only` is true, such as writers of
    files and `Progress`, act only on worker 0.

    Args:
        train_step: Any callable from a batch to a dict of tensors, such as a `TrainStep`. One with several arguments,
            such as `step(x, y)`, gets the parts of a batch that is a tuple. The loop counts `attempted` and `applied`
            in the dict, or else what the loss scalers in its graph did, see `Counters`. Scalars become `visit.outputs`.
            Tensors of a known shape become `visit.vectors`; at least one output must be a scalar. On several replicas
            vectors of integers are summed, those of floats averaged, and those named "amax" reduced by the maximum.
        dataset: A `tf.data.Dataset`, or any iterable of batches but a list or a tuple, such as a Grain `DataLoader`: it
            is read ahead in a thread, and its first batch at once. Make it repeat to run for more than an epoch.
        steps_per_call: Steps between visits of the host. 1 runs a Python loop, more a loop inside the graph. None
            chooses: the first call takes one step, and calls grow until the host visits about four times a second. No
            call passes a step at which an action with `every=` in steps acts, so that saves and evaluations happen at
            the same steps on every machine. An action with a method `next_visit(done) -> int | None` names the next
            step at which it must be called; others are called at each visit.
        strategy: A `tf.distribute` strategy, in whose scope model, optimizer and loss scaler were made. Each replica
            runs the step on an equal share of each batch.
        actions: What to do at each visit.
        jit_compile: Whether XLA compiles the train step; on a single replica only. "auto" compiles on a GPU, as Keras's
            `fit` does, except with a strategy, under op determinism, for a step that XLA has no kernels for, with a
            warning that says why, and for a `TrainStep` whose passes XLA already compiles. On a CPU it compiles a model
            that computes in 16 bits, with the same exceptions, if all batches have one shape, but for the rows of the
            last one, and XLA leaves nothing out of the step: in a graph it takes up to four times as long, and 100
            times on some processors. A run that goes on from a checkpoint does as it did before.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
        OutOfData: If an iterable has no batch.
    """

    def __init__(
        self,
        train_step: TrainStepFunction,
        dataset: tf.data.Dataset | Iterable[Any],
        *,
        steps_per_call: int | None = None,
        strategy: tf.distribute.Strategy | None = None,
        actions: Iterable[Action] = (),
        jit_compile: bool | str = "auto",
    ):
        if not isinstance(actions, Iterable):
            raise scaler.InvalidArgument(f"Loop(actions={actions!r}): expected a list of actions. Put it into one.")
        actions = list(actions)
        check_arguments(train_step, dataset, steps_per_call, strategy, actions, jit_compile)
        position = position_in(dataset)
        self._looked_at: tuple[tf.types.experimental.ConcreteFunction, StepResources] | None = None
        self.train_step = train_step
        # The steps that apply a window that is not full.
        self.windows = [one for one in named_by(train_step, TrainStep) if one.last_window == "apply"]
        train_step = taking_batches(train_step, position.element_spec)
        if strategy is not None:
            check_batches(position.element_spec, strategy)
            train_step = replicate(train_step, strategy)
        self.workers = Workers(strategy)
        self.resumed: Resumed | None = None
        self._strategy = strategy
        self.element_spec = position.element_spec
        self._counters = CounterVariables()
        self._start(position, actions, Pace(steps_per_call))
        self.calls = StepCalls(
            train_step,
            position.element_spec,
            self._counters,
            in_graph=None if steps_per_call is None else steps_per_call > 1,
            endless=self.position.endless,
            jit_compile=jit_compile if isinstance(jit_compile, bool) else None,
            strategy=strategy,
            written=self.train_step,
            steady_rows=has_steady_rows(position.dataset),
        )

    def _start(self, position: Position | SourcePosition, actions: Iterable[Action], pace: Pace) -> None:
        """What the host knows of a run before its first step."""
        self.actions = [one for one in actions if self.workers.index == 0 or not getattr(one, "chief_only", False)]
        self.position, self._pace = position, pace
        self._stopped_elsewhere: str | None = None
        self._checks = Checks(self.train_step)

    def restart(self, dataset: tf.data.Dataset | Iterable[Any], actions: Iterable[Action]) -> None:
        """Begins again at step 0 with the same traced step, over another dataset with the same `element_spec`.

        The variables of model, optimizer and scaler are the caller's to put back.
        """
        self._start(position_in(dataset), actions, Pace(self.steps_per_call))
        self._counters.reset()

    @property
    def counters(self) -> Counters:
        """The counts since the loop was made."""
        return self._counters.read()

    @property
    def steps_per_call(self) -> int | None:
        """Steps between visits of the host, or None if the loop chooses them."""
        return None if self._pace.chooses else self._pace.steps

    @property
    def longest_call(self) -> int:
        """The most steps that the next call takes."""
        return self._pace.steps

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self._strategy.num_replicas_in_sync if self._strategy else 1

    @property
    def stopped(self) -> str | None:
        """Why an action ended the run, or None if none did."""
        reasons = (reason for action in self.actions if (reason := getattr(action, "stopped", None)))
        return next(reasons, self._stopped_elsewhere)

    def why_skipped(self) -> str | None:
        """What the actions say of the last skip, for `LossScaler.explain`; None if they say nothing."""
        asked = (action.why_skipped() for action in self.actions if hasattr(action, "why_skipped"))
        return " ".join(filter(None, asked)) or None

    def identity(self, run: Mapping[str, object]) -> dict:
        """What distinguishes this run from others: its parts, and the user's `run`."""
        return identity(
            self.train_step,
            strategy=self._strategy,
            workers=self.workers.count,
            element_spec=self.element_spec,
            run=run,
        )

    def state(
        self,
        identity: Mapping[str, object],
        *,
        actions: Iterable[Action] | None = None,
        folder: pathlib.Path = pathlib.Path(),
    ) -> RunState:
        """Everything a resumed run needs. Traces the train step, which creates all of its variables.

        Args:
            identity: From `identity`; saved with the state.
            actions: Those whose state is saved; by default the loop's.
            folder: Of the checkpoints; the paths of actions are also saved relative to it.
        """
        step = self.calls.trace()
        groups = variable_groups(self.train_step, step)
        return RunState(
            groups=groups,
            held=self._held(step),
            counters=self._counters,
            position=self.position,
            actions=ActionStates(self.actions if actions is None else actions, folder),
            identity=identity,
            settings=settings(self.train_step, self.position.dataset, jit_compile=self.calls.jit_compile),
            trainable=trainable_flags(self.train_step, groups),
            loss_scaler=getattr(self.train_step, "loss_scaler", None),
        )

    def caveats(self) -> list[str]:
        """What a resumed run of this loop loses, one sentence per loss."""
        step = self.calls.trace()
        held = self._held(step)
        return [*self.position.caveats, *hidden_generators(), *caveats_of_kernels(step, held.called), *held.caveats]

    def _held(self, step: tf.types.experimental.ConcreteFunction) -> StepResources:
        """What a trace of the step holds in tables and iterators; cached, since their buffers may be large."""
        if self._looked_at is None or self._looked_at[0] is not step:
            self._looked_at = step, resources_of(step)
        return self._looked_at[1]

    def run(self, steps: int) -> Counters:
        """Runs until `steps` batches have been taken since the loop was made; a second call goes on from the first.

        Steps taken before a checkpoint was restored count: the same call in a new process ends where this one would.
        With nothing left to do it returns at once; `Progress` says so.

        Returns:
            The loop's counters. They are below `steps` if an action ended the run: `stopped` says why.

        Raises:
            OutOfData: If the dataset ends before. The counters and what the actions wrote stay.
            scaler.InvalidArgument: If `steps` is not an integer, or is below the steps already taken.
            NotWritable: If an action cannot write, or if another run writes the same file or folder.
            WorkerLost: If another worker is gone, or stopped with an error.
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with status 143.
        """
        try:
            counters = self._run(steps)
            while self._goes_back:
                counters = self._run(steps)
            return counters
        except scaler.ScalerError as error:
            # The message is all that a user needs: the frames of the loop would bury it.
            alone = copy.copy(error)
            alone.__traceback__ = None
            raise alone from None

    def _run(self, steps: int) -> Counters:
        check_count(f"run(steps)={steps!r}", steps)
        self._check_ahead(steps)
        self._stopped_elsewhere = None
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(deferred_signals())
            # Other workers would wait for the steps that a worker leaves out.
            self.position.heed(signals.received if self.workers.count == 1 else [])
            stack.callback(self.position.heed, [])
            writers = [(type(action).__name__, place) for action in self.actions if (place := place_of(action))]
            with self.workers.all_or_none("write what it is to write"):  # Worker 0 holds the locks for all workers.
                held = stack.enter_context(RunLocks(writers if self.workers.index == 0 else []))
            self._tell("begin", self)
            self._check_ahead(steps)
            for action in self.actions:
                if isinstance(action, contextlib.AbstractContextManager):
                    enter(stack, action)
            whole, failed, before = True, None, self.counters
            scalers: list[scaler.LossScaler] = []
            try:
                self._meet(signals)
                signals.act()
                done = before.data
                while done < steps and not self.stopped:
                    self.position.check()
                    whole = False
                    with self.workers.lost_is_an_error():
                        limit = self._limit(done, steps)
                        if self.windows:
                            self.end_windows(limit == 1 and done + 1 == self._last_step(steps))
                        call = self._take(limit)
                    scalars, vectors = scalars_and_vectors(call.outputs)
                    visit = Visit(call.counters, scalars, time.perf_counter() - start, steps, vectors)
                    error = self._act(visit, held) if call.steps else None
                    whole = True
                    self._meet(signals, error)
                    if call.steps and not self._goes_back:
                        self._checks.check(visit, call, self.why_skipped)
                    scalers = [one for one, _ in call.readings]
                    signals.act()
                    ended, taken = call.steps < limit and self.position.ended, done + call.steps
                    self.calls.undecided.look(taken, ended or taken >= steps or bool(self.stopped))
                    if ended:
                        raise OutOfData(why_out_of_data(taken, steps, of_source=self.position.dataset is None))
                    # Only an action may have moved the count since the call.
                    done = self.calls.taken if self.actions else taken
                if done == before.data:
                    self._tell("nothing_to_do", done, steps, None if done >= steps else self.stopped)
                if not self._goes_back:
                    warn_if_most_were_skipped(before, self.counters, scalers)
            except Exception as error:
                failed = error
                if not whole:
                    failed_step.tell_unseen(error, done, int(self._counters.data))
                raise
            finally:
                self.end_windows(False)
                if whole:
                    self._end(failed)
            signals.act()
        return self.counters

    def _tell(self, method: str, *facts: object) -> None:
        """Calls a method of each action that has it."""
        for action in self.actions:
            if hasattr(action, method):
                with named(action):
                    getattr(action, method)(*facts)

    @property
    def _goes_back(self) -> bool:
        """Whether an action ended the run only for it to begin again at an earlier step."""
        return any(getattr(action, "goes_back", False) for action in self.actions)

    def _limit(self, done: int, goal: int) -> int:
        """Steps of the next call, the same on all workers."""
        limit = self._pace.limit(done, goal, self.actions)
        if self.windows:  # The last micro-batch ends its window: it has a call of its own.
            limit = min(limit, max(1, self._last_step(goal) - 1 - done))
        return min(row[0] for row in self.workers.gather([limit])) if self._pace.chooses else limit

    def _last_step(self, goal: int) -> int:
        """The step that ends the run: its goal, or the end of a dataset that knows it."""
        known = -1 if self.position.dataset is None else int(self.position.dataset.cardinality())
        return goal if known < 0 else min(goal, known)

    def end_windows(self, ends: bool) -> None:
        """Says whether the next call's one micro-batch ends its window, for steps that apply short windows."""
        for step in self.windows:
            if step.window is None and ends:
                self.calls.trace()  # Which makes the window.
            if step.window is not None:
                step.window.ends.assign(ends)

    def take(self, limit: int) -> tuple[int, Outputs]:
        """Takes steps without a visit: they are counted, but no action is called.

        Args:
            limit: The most steps to take.

        Returns:
            The number of steps taken, fewer at the end of the data, and one at most if the step runs in a Python loop;
            and for each output an array [steps, ...].

        Raises:
            BadBatch: If the model or the loss cannot take a batch.
            NotWritable: If a `KeepBatches` cannot write a batch.
            OutOfData: If a dataset of infinite cardinality ends.
        """
        self.position.check()
        call = self._take(limit)
        return call.steps, call.outputs

    def _take(self, limit: int) -> CallResult:
        start = time.perf_counter()
        try:
            call = self.calls(self.position.iterator, limit)
        except tf.errors.OpError as error:
            if isinstance(error, tf.errors.OutOfRangeError) and END in error.message:
                raise OutOfData(why_endless_data_ended(self.counters.data)) from error
            known = bad_batch(error, self.element_spec) or kept_batches.write_error(error)
            if known is None:
                raise
            raise known from error
        self._pace.record(call.steps, time.perf_counter() - start)
        if self._pace.chooses and not self.calls.in_graph:
            self._pace.fix_at_one()
        return call

    def _meet(self, signals: Deferred, error: Exception | None = None) -> None:
        """Raises the error, if there is one; else does what signals, stops and errors of other workers demand here."""
        stopped_by = meet(self.workers, signals, error, stopped=bool(self.stopped), step=lambda: self.counters.data)
        if stopped_by is not None and not self.stopped:
            self._stopped_elsewhere = f"an action on worker {stopped_by} ended the run"

    def _act(self, visit: Visit, held: RunLocks) -> Exception | None:
        """Calls every action, those with `last` after the others, and returns the first error."""

        def call(action: Any) -> None:
            if place := place_of(action):
                held.keep(type(action).__name__, place)
            action(visit)

        in_turn = sorted(self.actions, key=lambda action: bool(getattr(action, "last", False)))
        last = visit.counters.data
        lacks = f"Step {last} is" if visit.first == last else f"Steps {visit.first} to {last} are"
        return _first_error(
            in_turn,
            call,
            f"{lacks} missing there; the other actions have acted. Then run again: a Checkpoint with resume=True (on "
            "the command line --resume) goes on from the last step that it saved.",
        )

    def _end(self, failed: Exception | None) -> None:
        """Ends every action, even after errors, and raises the first error, joined with the run's own."""
        first = _first_error([one for one in self.actions if hasattr(one, "end")], lambda action: action.end())
        if isinstance(first, scaler.ScalerError) and isinstance(failed, scaler.ScalerError):
            both = copy.copy(first)
            both.args = (" Before that: ".join(dict.fromkeys([str(first), str(failed)])),)
            raise both from first
        if first:
            raise first

    def _check_ahead(self, steps: int) -> None:
        done = self.counters.data
        if steps < done:
            raise scaler.InvalidArgument(
                f"run({steps}): this loop has already taken {done} steps, which count. Ask for more than {done}, or "
                "start over with a new loop and a new folder for its checkpoints."
            )


def _first_error(actions: Iterable[Any], call: Callable[[Any], object], then: str = "") -> Exception | None:
    """Calls a function with each action, also after errors of any kind: the others must still write, and save."""
    first = None
    for action in actions:
        try:
            with named(action, then):
                call(action)
        except Exception as error:
            first = first or error
    return first
