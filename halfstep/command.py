"""The command `halfstep`, also `python -m halfstep`.

Each command is a module that declares its arguments and defines `run`. Only `run` imports TensorFlow, so help and
usage errors are fast. Standard output whose reader is gone is handled here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence

from halfstep import hiding, statuses
from halfstep.parsing import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns:
        One of `halfstep.statuses`: 0 for success, 1 for failure, 2 for a usage error; docs/commands.md lists all. After
        SIGINT or SIGTERM, a run that saves checkpoints has saved its last step, and --resume goes on from there.
    """
    try:
        try:
            return _answered(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            _flush()
    except BrokenPipeError:
        _give_up()
        return statuses.EXIT_CLOSED_PIPE
    except OSError as error:
        _give_up()
        return _fail(f"standard output: {error.strerror or error}.", statuses.EXIT_ERROR)


def _answered(arguments: list[str]) -> int:
    asked = parser()
    options = asked.parse_args(arguments)
    options.arguments, options.parser = arguments, asked
    try:
        with _termination_is_an_exit():
            return _run(options)
    except KeyboardInterrupt:
        return _fail("interrupted; what was written so far is kept.", statuses.EXIT_INTERRUPTED)
    except SystemExit as error:
        if error.code != statuses.EXIT_TERMINATED:
            raise
        return _fail("terminated; what was written so far is kept.", statuses.EXIT_TERMINATED)


def _run(options: argparse.Namespace) -> int:
    # Hides TensorFlow's own log messages, except its errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    hidden = hiding.hidden()
    if hidden:
        return _fail(hidden, statuses.EXIT_ERROR)
    try:
        return importlib.import_module(f"halfstep.commands.{options.command}").run(options) or statuses.EXIT_DONE
    except Exception as error:
        answer = _message_and_status(error, hasattr(options, "out"))
        if answer is None:
            raise
        return _fail(*answer)


def _message_and_status(error: Exception, has_out: bool) -> tuple[str, int] | None:
    """The message and exit status for an error; None for a closed pipe or a bug.

    Args:
        error: What ended the command.
        has_out: Whether the command has the option `--out`.
    """
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return None
    # Both import TensorFlow.
    import scaler
    from loops.support.errors import WorkerLost

    if isinstance(error, scaler.InvalidArgument):
        return str(error), statuses.EXIT_USAGE
    if isinstance(error, WorkerLost):
        return str(error), statuses.EXIT_WORKER_LOST
    if isinstance(error, scaler.ScalerError):
        return str(error), statuses.EXIT_ERROR
    if isinstance(error, OSError):
        reason = error.strerror or error
        if error.filename is None:
            return f"standard output, or a file that was being written: {reason}.", statuses.EXIT_ERROR
        advice = " Choose a folder that can be written with --out." if has_out else ""
        return f"{error.filename}: {reason}.{advice}", statuses.EXIT_ERROR
    return None


@contextlib.contextmanager
def _termination_is_an_exit() -> Iterator[None]:
    """Makes SIGTERM end the command as Ctrl-C does: files are closed, and the status is `EXIT_TERMINATED`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(statuses.EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, status: int) -> int:
    print(f"halfstep: {message}", file=sys.stderr)
    return status


def _flush() -> None:
    """Flushes standard output while an error can still be reported."""
    if sys.stdout:
        sys.stdout.flush()


def _reader_is_gone() -> bool:
    """Whether standard output or standard error is a pipe whose reader is gone."""
    poll = select.poll()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            poll.register(stream.fileno(), select.POLLERR)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _give_up() -> None:
    """Discards output that cannot be written: otherwise Python would try again at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
