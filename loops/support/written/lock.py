"""A lock on a path, which ends with the process that has taken it, however that ends."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import socket
import sys
import warnings

from loops.support.json_values import read_json

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        # What is locked cannot be read there: a byte beyond what the file says.
        os.lseek(file, 2**30, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        # Not lockf: it lets go when anything in this process closes the file, such as a copy of the folder.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Held(Exception):
    """Somebody else has the lock; the message says who."""


class Lock:
    """A file that is locked while a run writes something, and says who does. It is removed when the run lets go.

    The system lets go of it when the process dies, on a shared disk too, which passes locks on to its server. On a disk
    that knows no locks, what the file says is all there is: a warning repeats it.

    Args:
        path: Of the file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path.absolute()
        self._file: int | None = None

    def take(self) -> None:
        """Takes it.

        Raises:
            Held: If another run has it.
            OSError: If the file cannot be made.
        """
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._locked(file)
                # The run that had it may have removed the file in between.
                if self._is(file):
                    self._file, file = file, -1
            finally:
                if file >= 0:
                    os.close(file)
        _taken.add(self)
        with contextlib.suppress(OSError):  # On a full disk it is locked all the same.
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, _self().encode())

    def keep(self) -> None:
        """Makes sure that the file is still there, so that others see it; where somebody removed it, takes it again.

        Raises:
            Held: If another run has it by now.
            OSError: If the file cannot be made, as where its folder was removed.
        """
        if self._file is not None and not self._is(self._file):
            self.forget()
            self.take()

    def release(self) -> None:
        """Lets go of it."""
        if self._file is not None and self._is(self._file):
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.forget()

    def forget(self) -> None:
        """Closes the file: the lock stays with a process that has it open, too."""
        _taken.discard(self)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _locked(self, file: int) -> None:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            raise Held(_holder(file)) from None
        except OSError as error:
            if os.fstat(file).st_size:
                warnings.warn(
                    f"{self.path.parent}: its disk knows no locks ({error.strerror}), so that two runs may write there "
                    f"at once. The last one that began, and did not end in order, was that of {_holder(file)}. Make "
                    "sure that it has ended.",
                    UserWarning,
                    stacklevel=2,
                )

    def _is(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except OSError:
            return False


_taken: set[Lock] = set()
"""Those of this process."""


def _let_the_parent_have_them() -> None:
    for lock in [*_taken]:
        lock.forget()


if hasattr(os, "register_at_fork"):
    # A child that outlives its parent would keep them. A new program does not: Python's files are closed for it.
    os.register_at_fork(after_in_child=_let_the_parent_have_them)


def _self() -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": f"{now:%Y-%m-%d %H:%M:%S} UTC"})


def _holder(file: int) -> str:
    """Who has a lock, in words."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        said = read_json(os.read(file, 2**12))
        who = "this process" if (said["pid"], said["host"]) == (os.getpid(), socket.gethostname()) else None
        return f"{who or 'process {pid} on {host}'.format(**said)}, since {said['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "a process that has not said its name"
