"""Locks the files and folders that a run writes, so that only one run at a time writes them.

A lock ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import socket
import sys
import warnings
from collections.abc import Iterable

import scaler
from loops.support.errors import NotWritable
from loops.support.json_values import read_json
from loops.support.written import Place

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        # Locks a byte beyond the text: on Windows a locked byte cannot be read.
        os.lseek(file, 2**30, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        # Not lockf: its lock ends when anything in this process closes the file, such as a copy of the folder.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class LockHeld(Exception):
    """Another process holds the lock; the message names it."""


class Lock:
    """A lock file that names its holder. It is removed when the lock is released.

    The system releases the lock when the process dies, also on a shared disk, which passes locks on to its server. On a
    disk without locks, only the text of the file is left: a warning repeats it.

    Args:
        path: The path of the lock file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path.absolute()
        self._file: int | None = None

    def take(self) -> None:
        """Takes the lock.

        Raises:
            LockHeld: If another run holds it.
            OSError: If the file cannot be created.
        """
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._locked(file)
                # The previous holder may have removed the file in between.
                if self._is(file):
                    self._file, file = file, -1
            finally:
                if file >= 0:
                    os.close(file)
        _taken.add(self)
        with contextlib.suppress(OSError):  # On a full disk the file is locked without its text.
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, _self().encode())

    def keep(self) -> None:
        """Takes the lock again if its file was removed, since others could not see it.

        Raises:
            LockHeld: If another run holds it now.
            OSError: If the file cannot be created, for example because its folder was removed.
        """
        if self._file is not None and not self._is(self._file):
            self.forget()
            self.take()

    def release(self) -> None:
        """Releases the lock, and removes its file."""
        if self._file is not None and self._is(self._file):
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.forget()

    def forget(self) -> None:
        """Closes the file without removing it: another process that has it open, too, keeps the lock."""
        _taken.discard(self)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _locked(self, file: int) -> None:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise LockHeld(_holder(file)) from None
        except OSError as error:
            if os.fstat(file).st_size:
                warnings.warn(
                    f"{self.path.parent}: its disk does not support locks ({error.strerror}), so two runs could write "
                    f"there at once. The last run that did not end properly was that of {_holder(file)}. Make sure "
                    "that it has ended.",
                    UserWarning,
                    stacklevel=2,
                )

    def _is(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except OSError:
            return False


_taken: set[Lock] = set()
"""The locks that this process holds."""


def _forget_all() -> None:
    for lock in [*_taken]:
        lock.forget()


if hasattr(os, "register_at_fork"):
    # A forked child that outlives its parent would keep the locks. Python closes its files for a new program.
    os.register_at_fork(after_in_child=_forget_all)


def _self() -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": f"{now:%Y-%m-%d %H:%M:%S} UTC"})


def _holder(file: int) -> str:
    """The holder of a lock, from the text of its file."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        holder = read_json(os.read(file, 2**12))
        who = "this process" if (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname()) else None
        return f"{who or 'process {pid} on {host}'.format(**holder)}, since {holder['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "an unknown process"


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
