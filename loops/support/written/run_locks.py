"""Locks the files and folders that a run writes, so that only one run at a time writes them."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterable

import scaler
from loops.support.errors import NotWritable
from loops.support.written.lock import Lock, LockHeld
from loops.support.written.place import Place


class RunLocks(contextlib.AbstractContextManager):
    """The locks of a run, each next to its file or in its folder.

    Writers of one folder share its lock. Devices and streams have none. A place where the lock cannot be created has
    none either: its writer will raise.

    Args:
        writers: Pairs of a writer's name and its place.

    Raises:
        scaler.InvalidArgument: If two of them write the same file.
        NotWritable: If another run writes one of the places.
    """

    def __init__(self, writers: Iterable[tuple[str, Place]]):
        self._locks: dict[pathlib.Path, Lock] = {}
        self._made: set[pathlib.Path] = set()
        users: dict[pathlib.Path, str] = {}
        with contextlib.ExitStack() as stack:
            stack.push(self)
            for user, place in writers:
                path = _lock_of(place)
                if path in users and place.kind == "file":
                    raise scaler.InvalidArgument(
                        f"{users[path]} and {user} both write {place.path}: expected a file for each."
                    )
                if path is not None and path not in users:
                    users[path] = user
                    self._take(user, place, path)
            stack.pop_all()

    def keep(self, user: str, place: Place) -> None:
        """Makes sure that a place is still locked by this run.

        Raises:
            NotWritable: If another run writes it now.
            OSError: If its folder was removed.
        """
        lock = self._locks.get(place.path)
        if lock:
            try:
                lock.keep()
            except LockHeld as holder:
                raise _refused(user, place, holder) from None

    def __exit__(self, kind: object = None, *exception: object) -> None:
        for lock in self._locks.values():
            lock.release()
        # After an error, remove the folders that this run created; rmdir keeps those that are not empty.
        for folder in sorted(self._made, reverse=True) if kind else ():
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _take(self, user: str, place: Place, path: pathlib.Path) -> None:
        lock = Lock(path)
        try:
            self._made.update(folder for folder in path.parents if not folder.exists())
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.take()
        except LockHeld as holder:
            raise _refused(user, place, holder) from None
        except OSError:
            return
        self._locks[place.path] = lock


def _lock_of(place: Place) -> pathlib.Path | None:
    if place.kind == "stream" or (place.kind == "file" and place.path.exists() and not place.path.is_file()):
        return None
    path = place.path.resolve()
    return path / ".lock" if place.kind == "folder" else path.parent / f".{path.name}.lock"


def _refused(user: str, place: Place, holder: LockHeld) -> NotWritable:
    return NotWritable(
        f"{user}({str(place.path)!r}): another run writes it, that of {holder}. Wait until it has ended, or choose "
        "another place. The lock ends with that process."
    )
