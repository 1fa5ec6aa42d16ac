"""The batches of a run, with places in them to go back to."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from loops.errors import LoopError
from loops.resume.position import Position

_MOST_BYTES = 2**30
"""Of batches that are kept, where a position cannot be saved."""


class Batches:
    """Gives a run's batches one by one, and those after a mark a second time.

    Where the position in the dataset can be saved, a mark saves it, outside of the run's folder. Where it cannot, the
    batches after a mark are kept, as many as a gibibyte holds.

    Args:
        position: The loop's, whose `problem` is known.
    """

    def __init__(self, position: Position):
        self._position = position
        self._folder: pathlib.Path | None = None
        self._marks: dict[str, Any] = {}
        self._kept: list[Any] = []
        self._next, self._bytes = 0, 0
        self._lost = False

    @property
    def by_one(self) -> bool:
        """Whether they must be asked for one by one, since only what `next` gave is given again."""
        return bool(self._position.problem)

    @property
    def iterator(self) -> tf.data.Iterator:
        """The dataset's own, for whoever takes many batches at once; not where `by_one` is true."""
        return self._position.iterator

    def mark(self, name: str) -> None:
        """Remembers this place."""
        if self.by_one:
            self._marks[name] = self._next
            return
        if self._folder is None:
            # Gone with this object, or when the process ends.
            folder = tempfile.TemporaryDirectory(prefix="halfstep-")
            weakref.finalize(self, folder.cleanup)
            self._folder = pathlib.Path(folder.name)
        with writing_positions():
            self._marks[name] = tf.train.Checkpoint(position=self.iterator).write(str(self._folder / name))

    @property
    def lost(self) -> bool:
        """Whether batches after a mark were too many to keep, so that nobody can go back."""
        return self._lost

    def go_back(self, name: str) -> None:
        """Has `next` give what it gave after the mark.

        Raises:
            LoopError: If those batches were too many to keep.
        """
        if not self.by_one:
            tf.train.Checkpoint(position=self.iterator).read(self._marks[name]).assert_consumed()
            return
        if self._lost:
            raise LoopError(
                f"the dataset cannot go back: {self._position.problem}; and the batches since the checkpoint are more "
                f"than {_MOST_BYTES >> 20} MiB, too many to keep. Save checkpoints more often."
            )
        self._next = self._marks[name]

    def next(self) -> Any:
        """The next batch, or None at the end of the data."""
        if not self.by_one:
            return next(self.iterator, None)
        if self._next < len(self._kept):
            batch = self._kept[self._next]
        else:
            batch = next(self._position.iterator, None)
            if batch is None or self._lost:
                return batch
            self._keep(batch)
        self._next += 1
        return batch

    def _keep(self, batch: Any) -> None:
        self._kept.append(batch)
        self._bytes += sum(_bytes(part) for part in tf.nest.flatten(batch, expand_composites=True))
        if self._bytes > _MOST_BYTES:
            self._kept, self._lost = [], True


@contextlib.contextmanager
def writing_positions() -> Iterator[None]:
    """Says in one sentence where positions could not be written.

    Raises:
        LoopError: In the place of the system's and TensorFlow's errors.
    """
    try:
        yield
    except (OSError, tf.errors.ResourceExhaustedError, tf.errors.UnknownError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
        raise LoopError(
            f"{tempfile.gettempdir()}: the position in the dataset could not be written there "
            f"({' '.join(reason.split())}). Make room, or set TMPDIR to another folder: it takes what the dataset's "
            "shuffle buffers and caches hold, several times."
        ) from error


def _bytes(tensor: tf.Tensor) -> int:
    return int(tf.size(tensor)) * max(tensor.dtype.size or 1, 1)
