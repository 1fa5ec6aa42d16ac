"""Writes a run's checkpoints, at the visit that saves."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from loops.loop.state import folder
from loops.support.errors import CheckpointError
from loops.support.text import one_line
from loops.support.written.place import reason

Then = Callable[[], None]
"""What to do once a checkpoint is whole."""


class Saves:
    """The checkpoints that a run writes.

    Args:
        checkpoint: What they hold.
        place: Their folder.
        keep: How many to keep.
        number: The step that the run goes on from.

    Attributes:
        number: The last step that was saved, or is being saved; None if that failed.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, place: pathlib.Path, keep: int, number: int):
        self.number: int | None = number
        self._place = place
        self._manager = tf.train.CheckpointManager(
            checkpoint, str(place), max_to_keep=keep, checkpoint_name=folder.NAME
        )

    def save(self, number: int, then: Then) -> None:
        """Saves a step.

        Raises:
            CheckpointError: If it cannot be written, or what comes then raises this.
        """
        with self.named(number):
            self._manager.save(checkpoint_number=number)
        self.number = number
        then()

    def check(self) -> None:
        """At a visit that does not save: nothing, since every save is over."""

    def wait(self) -> None:
        """Nothing, since every save is over."""

    def end(self, number: int, then: Then) -> None:
        """Saves the last step unless it is saved.

        Raises:
            CheckpointError: As `save`.
        """
        if number != self.number:
            self.save(number, then)

    def open(self) -> None:
        """Before the first step of a run."""

    def close(self) -> None:
        """After the last step, however the run ends."""

    @contextlib.contextmanager
    def named(self, number: int, *further: type[Exception]) -> Iterator[None]:
        """Turns errors of writing in the body into one sentence, and removes what they left.

        Args:
            number: The step that is saved.
            further: Further kinds of errors that are turned into it.

        Raises:
            CheckpointError: In place of an OSError or an OpError.
        """
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
