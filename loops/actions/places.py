"""Files and folders that actions write, refused before the first step where they cannot be written."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import scaler
from loops.errors import NotWritable


def as_path(action: str, name: str, place: object) -> pathlib.Path:
    """A user's path.

    Raises:
        scaler.InvalidArgument: For what is no path.
    """
    if not isinstance(place, (str, os.PathLike)) or isinstance(place, bytes) or not str(place):
        raise scaler.InvalidArgument(f"{action}({name}={place!r}): expected a path, as a string or a pathlib.Path.")
    return pathlib.Path(place)


@contextlib.contextmanager
def writing(action: str, place: pathlib.Path) -> Iterator[None]:
    """Says in one sentence what the system says of a place that cannot be written.

    Raises:
        NotWritable: In the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise NotWritable(
            f"{action}({str(place)!r}): it cannot be written ({error.strerror or error}). Choose another place."
        ) from error


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
