"""Profiles a few steps with TensorFlow's profiler."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import tensorflow as tf

from loops.loop.visit import Visit
from loops.support.errors import LoopError, check_count
from loops.support.written import Place, as_path, check_folder

if TYPE_CHECKING:
    from loops.loop.loop import Loop


class Profile:
    """Profiles some steps, once: from the first visit at or after step `first` to the first at least `steps` later.

    TensorBoard's profile plugin shows the result (`pip install tensorboard-plugin-profile`). A run that ends within the
    window writes the steps so far. A run that resumes after step `first` profiles nothing.

    Args:
        directory: The folder in which `plugins/profile/` is created.
        first: The step after which the window begins. The first calls of a run include tracing, and are not typical.
        steps: The least number of steps in the window, rounded up to whole calls.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, directory: str | os.PathLike, *, first: int = 10, steps: int = 5):
        for name, value in (("first", first), ("steps", steps)):
            check_count(f"Profile({name}={value!r})", value)
        self._directory = as_path("Profile", "directory", directory)
        self.writes = Place(self._directory, "folder")
        self._first, self._steps = int(first), int(steps)
        self._since: int | None = None
        self._done = False

    def begin(self, loop: Loop) -> None:
        """Before the first step.

        Raises:
            NotWritable: If the folder cannot be written.
        """
        check_folder("Profile", self._directory)
        self._since = None

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def next_visit(self, done: int) -> int | None:
        """The step at which the window begins or ends, whichever comes next after `done` steps."""
        if self._since is not None:
            return max(done + 1, self._since + self._steps)
        return None if self._done else max(done + 1, self._first)

    def __call__(self, visit: Visit) -> None:
        """Begins or ends the window.

        Raises:
            LoopError: If the profiler does not start, for example because another one runs in this process.
        """
        if self._since is not None:
            if visit.counters.data - self._since >= self._steps:
                self._stop()
        elif not self._done and visit.counters.data >= self._first:
            self._done = True
            if visit.first > self._first:
                return
            try:
                tf.profiler.experimental.start(str(self._directory))
            except (tf.errors.OpError, OSError) as error:
                raise LoopError(f"Profile({str(self._directory)!r}): the profiler did not start ({error}).") from error
            self._since = visit.counters.data

    def _stop(self) -> None:
        if self._since is not None:
            self._since = None
            tf.profiler.experimental.stop()
