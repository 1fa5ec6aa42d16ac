"""Saves a run, and resumes it."""

from __future__ import annotations

import functools
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

import scaler
from loops.actions.evaluate import Best
from loops.actions.saves import Saves
from loops.backend import versions
from loops.backend.variables import is_checkpoint_readable
from loops.loop.failed_step import add_note
from loops.loop.state import folder
from loops.loop.state.compared import Changes, Resumed, constant_rates, flat, meant_changes, other_rates
from loops.loop.state.described import NoText, exact, settings
from loops.loop.state.regrouped import how_to_go_on
from loops.loop.visit import Cadence, Seconds
from loops.loop.workers import Workers
from loops.support.errors import CheckpointError, ResumeWarning, check, check_count
from loops.support.written import Place, as_path, reason

if TYPE_CHECKING:
    from loops.loop.loop import Loop
    from loops.loop.state.state import RunState
    from loops.loop.visit import Visit


BEST = "best"
"""The name of the best checkpoint's folder, inside the folder of the others."""


class Checkpoint:
    """Saves everything that a run needs to continue bit for bit, and resumes from what was saved.

        loop = loops.Loop(step, dataset, actions=[loops.Checkpoint("run/checkpoints", every=500, resume=True)])
        loop.run(10_000)  # After any interruption, the same command again continues to step 10,000.

    It saves the model with its non-trainable state and seed generators, the optimizer, masters, loss scaler and
    accumulation window, each on every replica; every other variable, every mutable table and every iterator that the
    step's graph uses; the counters; the position in the dataset; the generators of TensorFlow, Keras, NumPy and Python;
    and the state of other actions that have `save_state` and `load_state`. It does not save the state of other
    operations of the step, such as the position of `tf.random.uniform`, a queue, or what a `tf.py_function` keeps in
    Python. A `ResumeWarning` names each operation that may have such a state, and what to use. It also names a dataset
    whose position cannot be saved: batches are then skipped instead.

    It saves at the first visit at or after each multiple of `every`, after all other actions have acted, and when
    the run ends: at its goal, at the end of the data, on SIGINT or SIGTERM, or because an action raised. It does not
    save after a step that raised. To resume, it takes the newest checkpoint whose checksums are all right, sets damaged
    ones aside with a `ResumeWarning`, and removes what a killed save left behind.

    With several workers each saves its own checkpoints, with its replicas, its position and its random generators:
    worker 0 in the directory, worker N in `worker-N` inside of it. They resume from the newest step that all of them
    have.

    With `background=True` the run does not wait for the disk. At the visit the state is copied in host memory, which
    takes as much of it as the state has bytes, and a thread writes the copy. The files are the same. A checkpoint is
    there once it is whole: the next save, and the end of the run, wait for that. An error of the thread is raised at
    the next visit, or at the end.

    A position in a dataset includes the contents of its shuffle buffers and caches, so a checkpoint is as large as
    those are.

    Args:
        directory: A separate folder for checkpoints named `ckpt-STEP`. It is made if missing.
        every: Steps between saves, in batches as `Loop.run` counts, or `Seconds`.
        keep: The number of newest checkpoints to keep, at least 2, in case the newest is damaged.
        resume: Whether to resume from the newest checkpoint in the folder, and start from the beginning if there is
            none. Without it a folder that has checkpoints is refused.
        best: A metric whose best step is also kept. At each improvement the step is saved, then copied into the folder
            `best` in the directory. The previous copy is removed only once the new one is complete, so there is always
            a best one. A run can resume from `best` like from any folder of checkpoints.
        run: Names and values by which this run differs from others, such as its seed: numbers, text, paths, dates,
            enums, arrays, dataclasses, and lists, sets and dicts of them. The optimizer, the scaling strategy, the
            shapes of variables and of batches of a fixed size (`drop_remainder=True`) and the number of replicas are
            compared anyway. If your own step resumes with other settings of its optimizer, or any run with another
            batch size or seed of its dataset, a `ResumeWarning` says so.
        background: Whether a thread writes while the next steps are taken.
        changed: The names of settings that are meant to differ from those of the checkpoint, such as
            `["learning_rate", "clip_norm", "loss_scaler"]`: the run goes on with those of this program. Without it such
            a run is refused. Another strategy of the loss scaler begins at the scale of the old one. A run on another
            number of devices names `replicas`; `workers` cannot change. The change is kept in the checkpoints, and
            `halfstep inspect` shows it.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    last = True

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        every: int | Seconds,
        keep: int = 3,
        resume: bool = False,
        best: Best | None = None,
        run: Mapping[str, object] | None = None,
        background: bool = False,
        changed: Sequence[str] = (),
    ):
        self._meant = Changes(changed)
        self._cadence = Cadence("Checkpoint", every)
        check_count(f"Checkpoint(keep={keep!r})", keep, 2)
        check(
            f"Checkpoint(best={best!r})",
            best is None or isinstance(best, Best),
            "an hs.Best, such as hs.Best(evaluate, 'loss')",
        )
        self.directory = self.place = as_path("Checkpoint", "directory", directory)
        self.writes = Place(self.directory, "folder")
        check(
            f"Checkpoint(run={run!r})",
            run is None or isinstance(run, Mapping),
            "a dict of names and values, such as {'seed': 0}",
        )
        for name, flag in {"resume": resume, "background": background}.items():
            check(f"Checkpoint({name}={flag!r})", isinstance(flag, bool), "True or False")
        self._keep, self._resume, self._best = int(keep), resume, best
        self._background = background
        self._run = _said(run or {})
        if best:  # Its state is saved with that of the actions.
            self.save_state, self.load_state = best.save_state, best.load_state
            self.state_keys, self.state_of = best.state_keys, best
        self._loop: Loop | None = None
        self._saves: Saves | None = None
        self._state: RunState | None = None
        self._leaves = False

    def begin(self, loop: Loop) -> None:
        """Before the first step: resumes from a checkpoint, or makes sure that there is none.

        Raises:
            CheckpointError: If the folder cannot be written, has checkpoints although `resume` is False, has only
                damaged ones, or belongs to another run. Nothing was changed then.
            WorkerLost: If another worker raised such an error.
        """
        if self._loop is loop:
            return
        workers = loop.workers
        with workers.all_or_none("use its checkpoints"):
            self._check_workers(workers)
            if self._best:
                self._best.check(loop, "Checkpoint(best=...)")
            self.place = folder.of_worker(self.directory, workers)
            found = self._look()
        number, facts, damaged = folder.newest_common(self.place, workers, found)
        path = folder.prefix(self.place, number or 0)
        identity = self.identity(loop)
        with workers.all_or_none("go on from its checkpoint"):
            here = settings(loop.train_step, loop.position.dataset)
            changes = meant_changes(path, facts, identity, here, self._meant) if number is not None else {}
            # A position that cannot be saved is restored by skipping, in the first iterator: a probe would make it.
            loop.position.problem = facts["data"]["problem"] if facts else None
            if not loop.position.problem:
                loop.position.probe()
            self._make_folder()
        if facts and not (self._meant.are("Loop.jit_compile") or "replicas" in changes):
            loop.calls.go_on_as(bool(facts["settings"]["Loop"]["jit_compile"]))
        state = loop.state(identity, folder=self.directory)
        self._meant.check({**flat(facts["identity"] if facts else {}), **flat(identity), **flat(state.settings)})
        checkpoint = tf.train.Checkpoint(**state.trackables())
        if number is not None:
            self._go_on(loop, state, checkpoint, (path, number), facts, changes)
        for caveat in loop.caveats():
            warnings.warn(f"Checkpoint: {caveat}", ResumeWarning, stacklevel=2)
        for step, why in damaged.items():
            folder.set_aside(self.place, step)
            warnings.warn(
                f"{self.place}: the checkpoint of step {step} is damaged ({why}); going on from step {number}.",
                ResumeWarning,
                stacklevel=2,
            )
        folder.sweep(self.place, self._keep, number or 0)
        self._loop, self._state, self._saves = loop, state, self._saves_of(checkpoint, number or 0, workers)
        if self._best:
            (self.directory / BEST).mkdir(exist_ok=True)
            folder.sweep_leftovers(self.directory / BEST)
            self._copy_best(self._best.step)
            self._check_best(number or 0)

    def go_back(self, loop: Loop, number: int) -> None:
        """Removes the checkpoints after a step, and resumes from the newest of the others.

        Raises:
            CheckpointError: As `begin`.
        """
        folder.sweep(self.place, self._keep, number)
        resumes, self._resume, self._loop, self._leaves = self._resume, True, None, False
        try:
            self.begin(loop)
        finally:
            self._resume = resumes

    def save_no_more(self) -> None:
        """Saves nothing until `go_back`: the steps since will be taken back, and none of the older saves may go."""
        self._leaves = True

    def identity(self, loop: Loop) -> dict:
        """What distinguishes the run of a loop from others, as it is saved."""
        return loop.identity(self._run)

    def next_visit(self, done: int) -> int | None:
        """The next step after `done` at which the action is due; None for a cadence in seconds."""
        return self._cadence.next_visit(done)

    def __enter__(self) -> Checkpoint:
        if self._saves is not None:
            self._saves.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: types.TracebackType | None) -> None:
        if self._saves is None:
            return
        try:
            self._saves.close()
        except CheckpointError as lost:
            if error is None:
                raise
            warnings.warn(str(lost), ResumeWarning, stacklevel=2)  # The run's own error is not hidden.
        if isinstance(error, KeyboardInterrupt) and self._saves.number:
            how = "" if self._resume else "with Checkpoint(resume=True) "
            saved = f"step {self._saves.number} is saved in {self.place}"
            add_note(error, f"halfstep: {saved}: {how}the same program goes on from there.")

    def __call__(self, visit: Visit) -> None:
        """Saves, if the steps of this visit reached a multiple of `every`."""
        if self._saves is None or self._loop is None or self._state is None:
            raise RuntimeError("Checkpoint is called by Loop.run, after its begin.")
        if self._leaves:
            return
        self._state.complete = visit.counters.data >= visit.goal or self._loop.stopped is not None
        due = self._cadence.due(visit)
        if self._best:
            self._best.look()
            due = due or self._best.step == visit.counters.data
        if due:
            self._saves.save(visit.counters.data, self._then())
        else:
            self._saves.check()

    def wait(self) -> None:
        """Waits until the last save is whole: with `background=True` a thread may still write it.

        Raises:
            CheckpointError: If it could not be written.
        """
        if self._saves is not None:
            self._saves.wait()

    def end(self) -> None:
        """After the last step: saves, unless that step is already saved."""
        if self._loop is not None and self._saves is not None and not self._leaves:
            self._saves.end(self._loop.counters.data, self._then())

    def _go_on(
        self,
        loop: Loop,
        state: RunState,
        checkpoint: tf.train.Checkpoint,
        saved: tuple[str, int],
        facts: Mapping,
        changes: dict[str, str],
    ) -> None:
        """Restores a checkpoint, but for what is meant to differ.

        Args:
            loop: The loop.
            state: Its state.
            checkpoint: Made of the state.
            saved: The path and the step of the checkpoint.
            facts: Its facts.
            changes: What of the run's identity is meant to differ, as `check_identity` returned it.
        """
        path, number = saved
        unlike, changes, others = how_to_go_on(path, facts, state, changes, self._meant, loop.counters.data)
        another_rate = any("learning_rate" in fact for fact in changes)
        set_rates = constant_rates(loop.train_step) if another_rate else lambda: None
        state.check(path, facts, unlike)
        if others:
            warnings.warn(
                f"{path} was saved by a program with other settings: {'; '.join(others)}. A constant "
                "learning rate goes on as it was saved; a schedule, and everything else, is this program's.",
                ResumeWarning,
                stacklevel=3,
            )
        state.restore(checkpoint, path, facts, unlike)
        set_rates()
        for caveat in loop.position.caveats_of_a_new_start if unlike.restart is not None else ():
            warnings.warn(f"Checkpoint: {caveat}", ResumeWarning, stacklevel=3)
        said = list(changes.values())
        state.changes = [*facts.get("changes", []), *([{"step": number, "changed": said}] if said else [])]
        loop.resumed = Resumed(number, tuple(said))
        for one in () if another_rate else other_rates(loop.train_step, facts["settings"]):
            warnings.warn(f"{path} was saved with another schedule: {one}", ResumeWarning, stacklevel=3)

    def _saves_of(self, checkpoint: tf.train.Checkpoint, number: int, workers: Workers) -> Saves:
        background = self._background and is_checkpoint_readable()
        if self._background and not background:
            warnings.warn(
                f"Checkpoint(background=True): {versions()} does not tell what a checkpoint writes, so it is "
                "written at the visit.",
                UserWarning,
                stacklevel=3,
            )
        return Saves(checkpoint, self.place, self._keep, number, workers, background=background)

    def _then(self) -> Callable[[], None]:
        """What comes once the step is saved."""
        return functools.partial(self._copy_best, self._best.step) if self._best else lambda: None

    def _copy_best(self, step: int) -> None:
        """Copies the best step's checkpoint if it still exists; does nothing if it is already copied."""
        if step in folder.numbers(self.directory):
            try:
                folder.copy(self.directory, self.directory / BEST, step)
            except OSError as error:
                raise CheckpointError(
                    f"{self.directory / BEST}: step {step} could not be copied ({reason(error)}). Make room, then run "
                    "again with resume=True (on the command line --resume)."
                ) from error

    def _check_best(self, number: int) -> None:
        """Warns if the folder holds a step of those that the run takes again, since the best one before is gone."""
        assert self._best is not None
        for step in folder.numbers(self.directory / BEST):
            if step > number:
                warnings.warn(
                    f"{self.directory / BEST} holds step {step}, and the run goes on from step {number}: there "
                    f"{self._best.describe()}. The folder keeps step {step} until a better one replaces it.",
                    ResumeWarning,
                    stacklevel=2,
                )

    def _check_workers(self, workers: Workers) -> None:
        if workers.count > 1 and self._cadence.in_seconds:
            raise CheckpointError(
                "Checkpoint(every=Seconds(...)) on several workers: they would save at different steps. Give a number "
                "of steps."
            )
        if workers.count > 1 and self._best:
            raise CheckpointError(
                "Checkpoint(best=...) on several workers: their metrics may differ, as BatchNorm's statistics do, and "
                "then each would keep another step. Evaluate the saved steps after the run."
            )

    def _look(self) -> folder.Found:
        """The newest readable checkpoint of this worker's folder."""
        found = folder.numbers(self.place)
        if found and not self._resume:
            raise CheckpointError(
                f"Checkpoint({str(self.directory)!r}): the folder holds checkpoints of a run at step {found[0]}. Go on "
                "from them with resume=True (on the command line --resume), or choose another folder."
            )
        number, facts, damaged = folder.newest_whole(self.place)
        if number is None and damaged:
            reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
            raise CheckpointError(
                f"{self.place}: none of its checkpoints can be read ({reasons}). Put a whole one there, or remove "
                "them to start from the beginning."
            )
        return number, facts, damaged

    def _make_folder(self) -> None:
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            (self.place / "probe-folder").touch()
            (self.place / "probe-folder").unlink()
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint({str(self.directory)!r}): the folder cannot be written ({reason(error)}). Choose another."
            ) from error


def _said(run: Mapping[str, object]) -> dict:
    """What `run=` says, as JSON."""
    try:
        return exact(run)
    except NoText as error:
        raise scaler.InvalidArgument(
            f"Checkpoint(run=...): it holds {str(error.args[0])[:100]!r}, which another process cannot tell from "
            "others. Expected numbers, text, paths, dates, enums, arrays, dataclasses, and lists, sets and dicts of "
            "them. Give its name or its version as text."
        ) from None
