"""Writes a run's checkpoints: at the visit that saves, or in the background, where a thread writes a copy."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loops.backend.variables import checkpoint_values
from loops.loop.state import folder
from loops.loop.workers import Workers
from loops.support.errors import CheckpointError
from loops.support.text import one_line
from loops.support.written import reason

Then = Callable[[], None]
"""What to do once a checkpoint is whole."""


class Saves:
    """The checkpoints that a run writes: at the visit that saves, or in the background, from a copy of the state.

    A save in the background is whole only later: when `wait` or the next save returns without an error. On several
    workers none begins such a save at a visit before all have written their last one. A kill then finds a worker at
    most one save ahead of another, as it does without a thread. At the end, where the others may be gone, none waits
    for them, but one more checkpoint is kept.

    Args:
        checkpoint: What they hold.
        place: Their folder.
        keep: How many to keep.
        number: The step that the run goes on from.
        workers: All workers.
        background: Whether a thread writes.

    Attributes:
        number: The last step that was saved, or is being saved; None if that failed.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        place: pathlib.Path,
        keep: int,
        number: int,
        workers: Workers,
        *,
        background: bool,
    ):
        self.number: int | None = number
        self._checkpoint, self._place, self._keep, self._workers = checkpoint, place, keep, workers
        self._background = background
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future | None = None
        self._failed: CheckpointError | None = None

    def open(self) -> None:
        """Before the first step of a run: gets memory for the copy, in the thread."""
        self._failed = None
        if self._background:
            self._copy = HostCopy(self._checkpoint)
            # The interpreter waits for such a thread: what it has begun becomes whole.
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
            self._pending = self._thread.submit(self._copy.get_memory)

    def save(self, number: int, then: Then) -> None:
        """Saves a step; in the background, once the last save is over on all workers.

        Raises:
            CheckpointError: If it cannot be written, what comes then raises this, or the last save failed.
            WorkerLost: If the last save failed on another worker.
        """
        if self._background:
            with self._workers.all_or_none("write its last checkpoint"):
                self.wait()
        self._begin(number, then)

    def check(self) -> None:
        """At a visit that does not save: raises what went wrong in the thread; waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is whole.

        Raises:
            CheckpointError: If it failed.
        """
        if self._pending is None:
            return
        try:
            self._pending.result()
        except CheckpointError as error:
            self._failed = error
            raise
        finally:
            if self._pending.done():  # Else Ctrl-C ended the wait.
                self.number = None if self._pending.exception() else self.number
                self._pending = None

    def end(self, number: int, then: Then) -> None:
        """Waits for the last save, also for that of the last step. A single worker tries that after an error, too.

        Raises:
            CheckpointError: If one of them failed.
        """
        alone, failed = self._workers.count == 1, None
        try:
            self.wait()
        except CheckpointError as error:
            failed = error
        if self._failed and not alone:
            raise self._failed  # Only what is here may be what all have in common: nothing of it is removed.
        if number != self.number:
            try:
                self._begin(number, then, one_more=self._background and not alone)
                self.wait()
            except CheckpointError as error:
                said = dict.fromkeys(str(one) for one in (error, failed) if one)
                raise CheckpointError(" Before that: ".join(said)) from error
        if failed:
            raise failed

    def close(self) -> None:
        """After the last step, however the run ends: waits for the thread, and gives the memory back."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
                del self._copy

    def _begin(self, number: int, then: Then, *, one_more: bool = False) -> None:
        """Writes a checkpoint, or has the thread write a copy; then removes the oldest, or leaves one more."""
        self._checkpoint.save_counter.assign_add(1)  # As TensorFlow's manager does.
        keep = self._keep + one_more
        if not self._background:
            with self._named(number):
                self._checkpoint.write(folder.prefix(self._place, number))
                folder.sweep(self._place, keep, number)
            self.number = number
            then()
            return
        assert self._thread is not None
        with self._named(number):
            copied = self._copy.take()
        self._pending = self._thread.submit(self._write, number, copied, then, keep)
        self.number = number

    def _write(self, number: int, copied: list[Copied], then: Then, keep: int) -> None:
        with self._named(number, Exception):
            write(self._place, number, copied)
            folder.sweep(self._place, keep, number)
        then()

    @contextlib.contextmanager
    def _named(self, number: int, *further: type[Exception]) -> Iterator[None]:
        """Turns errors of writing in the body, and further kinds, into one sentence, and removes what they left."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise self._could_not(number, reason(error)) from error
        except further as error:
            raise self._could_not(number, f"{type(error).__name__}: {one_line(error)}") from error

    def _could_not(self, number: int, why: str) -> CheckpointError:
        with contextlib.suppress(OSError):
            folder.sweep_leftovers(self._place)
        return CheckpointError(
            f"{self._place}: step {number} could not be saved ({why}). The checkpoints before it are as they were: "
            "make room, then run again with resume=True (on the command line --resume)."
        )


class Copied(NamedTuple):
    """A value of a checkpoint that no step changes.

    Attributes:
        name: Its name in the file.
        slices: Which part of the name's value it is.
        value: An array in the memory of the copy, or a tensor.
        dtype: The value's own: the array may have another of the same size.
    """

    name: str
    slices: str
    value: np.ndarray | tf.Tensor
    dtype: tf.DType

    @property
    def tensor(self) -> tf.Tensor:
        """The value, in the same memory."""
        if isinstance(self.value, tf.Tensor):
            return self.value
        shared = tf.experimental.dlpack.from_dlpack(self.value.__dlpack__())
        return shared if shared.dtype == self.dtype else tf.bitcast(shared, self.dtype)


def write(place: pathlib.Path, number: int, copied: Iterable[Copied]) -> None:
    """Writes a checkpoint as TensorFlow does: elsewhere, then its data and at last its index are moved into place.

    Raises:
        tf.errors.OpError: If it cannot be written.
    """
    path, parts = folder.prefix(place, number), list(copied)
    part = f"{path}_temp/part-00000-of-00001"
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=part,
            tensor_names=[one.name for one in parts],
            shape_and_slices=[one.slices for one in parts],
            tensors=[one.tensor for one in parts],
        )
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=[part], destination_prefix=path, delete_old_dirs=True)


_ALIGNMENT = 64
"""Bytes. TensorFlow copies memory that begins elsewhere."""
_SHARED = (tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8)
"""Dtypes that NumPy passes on without a copy."""


class HostCopy:
    """Copies all values of a checkpoint. A further copy overwrites the one before.

    New memory takes a system longer to give than a copy takes. So it is asked for once.

    Args:
        checkpoint: Its variables on the host are counted now. What does not fit later gets memory of its own.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        self._checkpoint = checkpoint
        self._memory = np.empty(_size(checkpoint) + _ALIGNMENT, np.uint8)
        self._first = -self._memory.ctypes.data % _ALIGNMENT

    def get_memory(self) -> None:
        """Has the system give all of the memory."""
        np.copyto(self._memory, np.uint8(0))

    def take(self) -> list[Copied]:
        """Copies all values as they are now. Those of other devices, which are copies already, are kept as they are."""
        copied, place = [], self._first
        for name, slices, tensor, fetched in checkpoint_values(self._checkpoint):
            value: np.ndarray | tf.Tensor = tensor
            if tensor.dtype in (*_SHARED, tf.bfloat16) and not fetched:
                source = np.asarray(tensor)
                source = source.view(np.int16) if tensor.dtype == tf.bfloat16 else source
                value = self._room(place, source)
                np.copyto(value, source)
                place += _rounded(source.nbytes)
            elif tensor.dtype != tf.variant and not fetched:  # The variants of iterators are never written again.
                value = tf.constant(tensor.numpy(), tensor.dtype)
            copied.append(Copied(name, slices, value, tensor.dtype))
        return copied

    def _room(self, place: int, like: np.ndarray) -> np.ndarray:
        """An array from a place in the memory on; one of its own where that ends before."""
        part = self._memory[place : place + like.nbytes]
        return part.view(like.dtype).reshape(like.shape) if part.nbytes == like.nbytes else np.empty_like(like)


def _size(checkpoint: tf.train.Checkpoint) -> int:
    found = tf.train.TrackableView(checkpoint).descendants()
    known = [one for one in found if isinstance(one, tf.Variable) and one.shape.is_fully_defined()]
    return sum(_rounded(one.shape.num_elements() * one.dtype.size) for one in known if "CPU" in one.device)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
