"""What an action writes, the error, with its name, if that cannot be written, and a file that grows in whole pieces."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import tensorflow as tf

import scaler
from loops.support.errors import NotWritable

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Place(NamedTuple):
    """What an action writes; the value of its attribute `writes`.

    Attributes:
        path: The path; for a stream its name.
        kind: A file, a folder of files whose names the action chooses, or a stream.
    """

    path: pathlib.Path
    kind: Literal["file", "folder", "stream"]


def as_path(action: str, name: str, place: object) -> pathlib.Path:
    """A user's argument as a path.

    Raises:
        scaler.InvalidArgument: If it is not a path.
    """
    if not isinstance(place, (str, os.PathLike)) or isinstance(place, bytes) or not str(place):
        raise scaler.InvalidArgument(f"{action}({name}={place!r}): expected a path, as a string or a pathlib.Path.")
    return pathlib.Path(place)


@contextlib.contextmanager
def writing(action: str, place: pathlib.Path, then: str = "") -> Iterator[None]:
    """Turns errors of writing in the body into one sentence.

    Args:
        action: The name of the writer.
        place: The path that is written.
        then: A further sentence for the message.

    Raises:
        NotWritable: In place of an OSError or an OpError, except for a broken pipe.
    """
    try:
        yield
    except (scaler.ScalerError, BrokenPipeError):
        raise
    except (OSError, tf.errors.OpError) as error:
        why = reason(error)
        if isinstance(error, OSError) and error.filename and os.fspath(error.filename) != str(place):
            why = f"{why}: {os.fspath(error.filename)!r}"
        full = any(os.strerror(number) in why for number in _FULL)
        remedy = "Make room, or choose another place." if full else "Choose another place."
        raise NotWritable(
            f"{action}({str(place)!r}): it cannot be written ({why}). {remedy}" + (f" {then}" if then else "")
        ) from error


def reason(error: OSError | tf.errors.OpError) -> str:
    """The system's message, without the parts about TensorFlow's graph."""
    if isinstance(error, tf.errors.OpError):
        return " ".join(error.message.split("[[")[0].split("}}")[-1].split())
    return error.strerror or str(error)


def check_folder(action: str, folder: pathlib.Path) -> None:
    """Creates a folder, and makes sure that files can be written in it.

    Raises:
        NotWritable: If they cannot.
    """
    with writing(action, folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()


def place_of(action: object) -> Place | None:
    """What an action writes, from its attribute `writes`; None without it."""
    found = getattr(action, "writes", None)
    return found if isinstance(found, Place) else None


@contextlib.contextmanager
def named(action: object, then: str = "") -> Iterator[None]:
    """Adds the names of an action and of its file to errors of writing in the body.

    Args:
        action: The action. Errors are unchanged if it has no attribute `writes`.
        then: A further sentence for the message.

    Raises:
        NotWritable: In place of an OSError or an OpError.
    """
    place = place_of(action)
    with writing(type(action).__name__, place.path, then) if place else contextlib.nullcontext():
        yield


def enter(stack: contextlib.ExitStack, action: contextlib.AbstractContextManager) -> None:
    """Enters an action, and registers its exit with the stack. An error of the exit does not hide an earlier one."""

    def leave(kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        try:
            with named(action):
                return action.__exit__(kind, error, trace)
        except OSError:
            if error is None:
                raise
            return None

    with named(action):
        action.__enter__()
    stack.push(leave)


class AppendFile:
    """A file opened for appending without a buffer: each piece is written in one system call.

    Args:
        path: The file. Missing folders are created.
        end: The number of bytes to keep; None for all of them.

    Raises:
        OSError: If it cannot be written.
    """

    def __init__(self, path: pathlib.Path, end: int | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Absolute, because the process may change its folder.
        self._path = path.absolute()
        self._file = path.open("wb" if end == 0 else "ab", buffering=0)
        if end:
            self._file.truncate(end)

    def add(self, piece: bytes) -> None:
        """Appends bytes: all of them, or none if they cannot be written.

        Raises:
            OSError: If they cannot be written, or if the file has left its path, where they would be lost.
        """
        found = os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(found, self._path.stat()):
                self._write(piece, found.st_size)
                return
        raise FileNotFoundError(errno.ENOENT, "it was removed or replaced while the run wrote it")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, piece: bytes, end: int) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # A device cannot be truncated.
                self._file.truncate(end)
                self._file.seek(end)
            raise
