"""What an action writes, and what is said where it cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import tensorflow as tf

import scaler
from loops.support.errors import NotWritable

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Place(NamedTuple):
    """What an action writes, as its attribute `writes` tells a loop.

    Attributes:
        path: Where it is; of a stream its name.
        kind: A folder holds files whose names the action chooses.
    """

    path: pathlib.Path
    kind: Literal["file", "folder", "stream"]


def as_path(action: str, name: str, place: object) -> pathlib.Path:
    """A user's path.

    Raises:
        scaler.InvalidArgument: For what is no path.
    """
    if not isinstance(place, (str, os.PathLike)) or isinstance(place, bytes) or not str(place):
        raise scaler.InvalidArgument(f"{action}({name}={place!r}): expected a path, as a string or a pathlib.Path.")
    return pathlib.Path(place)


@contextlib.contextmanager
def writing(action: str, place: pathlib.Path, then: str = "") -> Iterator[None]:
    """Says in one sentence what the system or TensorFlow says of a place that cannot be written.

    Args:
        action: Who writes it.
        place: What is written.
        then: A further sentence.

    Raises:
        NotWritable: In the place of an OSError or an OpError, but for a pipe that nobody reads any more.
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
    """What the system says, without what TensorFlow tells of its graph."""
    if isinstance(error, tf.errors.OpError):
        return " ".join(error.message.split("[[")[0].split("}}")[-1].split())
    return error.strerror or str(error)


def check_folder(action: str, folder: pathlib.Path) -> None:
    """Makes a folder, and makes sure that files can be written in it.

    Raises:
        NotWritable: If they cannot.
    """
    with writing(action, folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
