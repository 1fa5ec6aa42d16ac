"""The last batches of a run, on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from loops.loop import kept_batches
from loops.support.errors import LoopError, check_count
from loops.support.written import Place, as_path, check_folder, writing

if TYPE_CHECKING:
    from loops.loop.loop import Loop
    from loops.loop.visit import Visit


class KeepBatches:
    """Keeps the last batches on disk, so that `halfstep explain` can repeat steps whose data cannot be read again.

        actions = [loops.KeepBatches("run/batches", last=500), loops.Checkpoint("run/checkpoints", every=400)]

    Use it for a dataset whose position cannot be saved, such as one from a generator, or that gives other data each
    time it starts. A step is repeated from a checkpoint before it, with all batches in between: keep more batches than
    there are steps between checkpoints.

    The graph writes each batch, as the dataset gave it, just before its step, without a visit of the host. This takes
    half a millisecond plus 3 ms per megabyte of the batch, as measured on a common CPU. It needs the disk space of
    `last` batches: each replaces the one `last` steps before. A file that a kill left incomplete is detected and not
    used. A resumed run continues the numbers of its steps; a new run removes the batches in the folder.

    Args:
        directory: A folder for files named `batch-N`. It is made if missing.
        last: How many batches to keep.

    Raises:
        NotWritable: When the run begins, if the folder cannot be written.
        LoopError: When the run begins, on several replicas, for batches that hold datasets, or with a second
            `KeepBatches`; later, if a batch cannot be written: its step is not taken.
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, directory: str | os.PathLike, *, last: int = 100):
        self.directory = as_path("KeepBatches", "directory", directory)
        self.writes = Place(self.directory, "folder")
        check_count(f"KeepBatches(last={last!r})", last)
        self.last = int(last)
        self._folder = self.directory.absolute()
        self._loop: Loop | None = None

    def begin(self, loop: Loop) -> None:
        """Before the first step: makes the folder.

        Raises:
            LoopError: If such batches cannot be written.
        """
        replicas = loop.identity({})["replicas"]
        if replicas > 1:
            raise LoopError(
                f"KeepBatches: the loop has {replicas} replicas, but batches can be kept only on a single device. "
                "Leave it out."
            )
        if not kept_batches.writable(loop.element_spec):
            raise LoopError(
                f"KeepBatches: the batches are {loop.element_spec}, with a part that is not a tensor of values, such "
                "as a dataset. Make tensors of it in the dataset's map, or leave KeepBatches out."
            )
        if sum(isinstance(action, KeepBatches) for action in loop.actions) > 1:
            raise LoopError("the loop has more than one KeepBatches among its actions: leave one.")
        check_folder("KeepBatches", self._folder)
        self._loop = loop

    def __enter__(self) -> KeepBatches:
        if self._loop is None:
            raise RuntimeError("KeepBatches is used by Loop.run, after its begin.")
        # Not in `begin`: a Checkpoint's `begin` may run later, and sets how many steps were taken.
        with writing("KeepBatches", self._folder):
            kept_batches.sweep(self._folder, self._loop.counters.data)
        self._loop.calls.show_batches(self._write)
        return self

    def __exit__(self, *exception: object) -> None:
        # Steps that are repeated after the run must not be kept.
        if self._loop is not None:
            self._loop.calls.show_batches(None)

    def __call__(self, visit: Visit) -> None:
        """Does nothing: the graph has already written the batches."""

    def _write(self, batch: Any, step: tf.Tensor) -> tf.Operation:
        assert self._loop is not None
        return kept_batches.write(
            self._folder, batch, step, last=self.last, element_spec=self._loop.position.batch_spec
        )
