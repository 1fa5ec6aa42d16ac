"""The batches of a run, with marks to go back to, and its steps repeated over them without calling any action."""

from __future__ import annotations

import pathlib
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from loops.loop.kept_batches import KeptBatches
from loops.loop.loop import Loop
from loops.loop.state.position import Position, SourcePosition
from loops.record.keep_batches import KeepBatches
from loops.support.errors import LoopError, OutOfData
from loops.support.signals import Deferred
from loops.support.text import amount
from loops.support.written import reason

_MOST_BYTES = 2**30
"""The most memory for batches, if a position cannot be saved."""


class Batches:
    """Gives a run's batches one by one, and can give those after a mark again.

    Batches that the run stored are read from its files. For others, a mark saves the position in the dataset, outside
    of the run's folder. If the position cannot be saved, and in a source of batches that is no dataset, the batches
    after a mark are kept in memory, up to 1 GiB.

    Args:
        position: The loop's position, after a probe.
        began_at: How many batches were taken before.
        stored: Those that the run stored, if the dataset may not give them again.

    Attributes:
        from_dataset: The steps whose batches came from the dataset through `next`.
        lost: Whether the batches after a mark were too many to keep, so that `go_back` is impossible.
    """

    def __init__(self, position: Position | SourcePosition, began_at: int = 0, stored: KeptBatches | None = None):
        self._position = position
        self._stored = stored
        self._folder: pathlib.Path | None = None
        self._marks: dict[str, Any] = {}
        self._held: dict[int, Any] = {}
        self._given = self._read = began_at
        self._bytes = 0
        self.lost = False
        self.from_dataset: set[int] = set()

    @property
    def by_one(self) -> bool:
        """Whether all batches must be taken with `next`, since only those can be given again."""
        return not self._position.trackables() or self._stored is not None

    def mark(self, name: str) -> None:
        """Remembers this place."""
        if self.by_one:
            self._marks[name] = self._given
            return
        try:
            if self._folder is None:
                # Removed with this object, or when the process ends.
                folder = tempfile.TemporaryDirectory(prefix="halfstep-")
                weakref.finalize(self, folder.cleanup)
                self._folder = pathlib.Path(folder.name)
            self._marks[name] = tf.train.Checkpoint(position=self._position.iterator).write(str(self._folder / name))
        except (OSError, tf.errors.ResourceExhaustedError, tf.errors.UnknownError) as error:
            raise LoopError(
                f"{tempfile.gettempdir()}: the position in the dataset could not be written there ({reason(error)}). "
                "Make room, or set TMPDIR to another folder: it needs several times the size of the dataset's shuffle "
                "buffers and caches."
            ) from error

    def go_back(self, name: str) -> None:
        """Makes `next` give the batches after the mark again.

        Raises:
            LoopError: If those batches were too many to keep.
        """
        if not self.by_one:
            tf.train.Checkpoint(position=self._position.iterator).read(self._marks[name]).assert_consumed()
            return
        if self.lost:
            raise LoopError(
                f"the dataset cannot go back: {self._position.problem or 'it may give other data'}; and the batches "
                f"since the checkpoint are more than {_MOST_BYTES >> 20} MiB, too many to keep in memory. Save "
                "checkpoints more often, or keep all of these batches on disk with hs.KeepBatches(directory, last=)."
            )
        self._given = self._marks[name]

    def next(self) -> Any:
        """The next batch, or None at the end of the data."""
        if not self.by_one:
            return next(self._position.iterator, None)
        step = self._given + 1
        batch = self._stored.get(step) if self._stored else None
        if batch is None:
            batch = self._of_dataset(step)
        if batch is not None:
            self._given = step
        return batch

    def _of_dataset(self, step: int) -> Any:
        """A step's batch from memory, or from the dataset, which is read up to it."""
        self.from_dataset.add(step)
        batch = self._held.get(step)
        while self._read < step:
            batch = next(self._position.iterator, None)
            if batch is None:
                return None
            self._read += 1
            if self._read == step:
                self._hold(step, batch)
        return batch

    def _hold(self, step: int, batch: Any) -> None:
        if self.lost:
            return
        self._held[step] = batch
        self._bytes += sum(_bytes(part) for part in tf.nest.flatten(batch, expand_composites=True))
        if self._bytes > _MOST_BYTES:
            self._held, self.lost = {}, True


def _bytes(tensor: tf.Tensor) -> int:
    return int(tf.size(tensor)) * max(tensor.dtype.size or 1, 1)


def _keeper_of(loop: Loop) -> KeepBatches | None:
    """The loop's `KeepBatches`, if it has one."""
    return next((action for action in loop.actions if isinstance(action, KeepBatches)), None)


def stored_by(loop: Loop) -> KeptBatches | None:
    """The batches that the loop's `KeepBatches` has stored; None without one."""
    keeper = _keeper_of(loop)
    return KeptBatches(keeper.directory, loop.position.batch_spec) if keeper else None


def caveats_of_data(loop: Loop, caveats: list[str], from_dataset: Set[int]) -> list[str]:
    """How the data of replayed steps may differ from the run's, and what to do, one sentence per difference.

    Args:
        loop: The run's loop.
        caveats: The dataset's caveats.
        from_dataset: The replayed steps whose batches were not stored.
    """
    keeper = _keeper_of(loop)
    if not caveats or (keeper and not from_dataset):
        return []
    if keeper is None:
        return [*caveats, "an hs.KeepBatches(directory) among the actions keeps the batches from now on"]
    more = f" and {len(from_dataset) - 1} later ones" if len(from_dataset) > 1 else ""
    return [
        *caveats,
        f"the batch of step {min(from_dataset)}{more} came from the dataset: {keeper.directory} holds the last "
        f"{keeper.last} of the run, and a damaged file is not used",
    ]


Replayed = dict[int, dict[str, np.ndarray]]
"""The scalar outputs of each step, by its number."""


def run_to_step(
    loop: Loop,
    batches: Batches,
    until: int,
    rows: Sequence[Mapping],
    signals: Deferred,
    progress: Callable[[int], object] | None = None,
) -> Replayed:
    """Takes steps as the run did, in calls of the same length.

    Args:
        loop: The loop, at an earlier step.
        batches: The loop's batches.
        until: The step to stop after.
        rows: Of the run's log: where a window ended early it ends so again, also that of the step after `until`.
        signals: The signals received, which are acted on after each call.
        progress: Called with the number of the last step, after each call.

    Raises:
        OutOfData: If the dataset ends before.
    """
    replayed: Replayed = {}
    ends = sorted(row["step"] for row in rows if row.get("attempted"))
    while (done := loop.counters.data) < until:
        if loop.windows:
            following = next((step for step in ends if step > done), until + 1)
            loop.end_windows(following == done + 1)
            limit = max(1, min(following - 1, until) - done)
        else:
            limit = until - done
        taken, outputs = _call(loop, batches, limit)
        for place in range(taken):
            replayed[done + 1 + place] = {name: values[place] for name, values in outputs.items()}
        if not taken:
            steps = amount(done, "step")
            raise OutOfData(f"the dataset ended after {steps}, but the run went on at least to step {until}.")
        signals.act()
        if progress:
            progress(done + taken)
    loop.end_windows(until + 1 in ends)
    return replayed


def _call(loop: Loop, batches: Batches, left: int) -> tuple[int, dict[str, np.ndarray]]:
    if not batches.by_one:
        return loop.take(min(loop.longest_call, left))
    batch = batches.next()
    if batch is None:
        return 0, {}
    return 1, {name: value[np.newaxis] for name, value in loop.calls.one(batch).items()}
