"""The command `halfstep`, also `python -m loops`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence

import scaler
from loops.cli import compare, cure, doctor, explain, inspect, lint, observe, replay, report, study, train, tune, watch
from loops.cli.launch import EXIT_WORKER_LOST
from loops.errors import WorkerLost
from loops.interrupts import EXIT_INTERRUPTED, EXIT_TERMINATED

_EXIT_ERROR = 1
_EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns:
        0 if it did what was asked, 1 if it could not, 2 if what was asked makes no sense, 3 if some runs of a study
        failed and others finished, 4 if lint found something that hurts or observing a run changes it, 75 if another
        worker could not be reached, was lost or stopped with an error, 130 after SIGINT (Ctrl-C), 143 after SIGTERM. A
        run that saves checkpoints has saved its last step then, but for 75, and --resume goes on from it.
    """
    parser = argparse.ArgumentParser(
        prog="halfstep", description="Mixed-precision training with a loss scaler you can take apart."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (study, train, watch, report, compare, lint, inspect, explain, cure, observe, replay, tune, doctor):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with _termination_is_an_exit():
            status = options.run(options)
    except scaler.InvalidArgument as error:
        return _fail(str(error), _EXIT_USAGE)
    except WorkerLost as error:
        return _fail(str(error), EXIT_WORKER_LOST)
    except scaler.ScalerError as error:
        return _fail(str(error), _EXIT_ERROR)
    except OSError as error:
        place, reason = error.filename or "the output folder", error.strerror or error
        return _fail(f"{place}: {reason}. Choose a folder that can be written with --out.", _EXIT_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted; what was written until here is kept.", EXIT_INTERRUPTED)
    except SystemExit as error:
        if error.code != EXIT_TERMINATED:
            raise
        return _fail("terminated; what was written until here is kept.", EXIT_TERMINATED)
    return status or 0


@contextlib.contextmanager
def _termination_is_an_exit() -> Iterator[None]:
    """Has SIGTERM end the command as Ctrl-C does, with files closed and its own status."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, status: int) -> int:
    print(f"halfstep: {message}", file=sys.stderr)
    return status
