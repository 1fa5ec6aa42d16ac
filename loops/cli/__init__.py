"""The command `halfstep`, also `python -m loops`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import scaler
from loops.cli import doctor, study, train

_EXIT_ERROR = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns:
        0 if it did what was asked, 1 if it could not, 2 if what was asked makes no sense, 130 if it was interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="halfstep", description="Mixed-precision training with a loss scaler you can take apart."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (study, train, doctor):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except scaler.InvalidArgument as error:
        return _fail(str(error), _EXIT_USAGE)
    except scaler.ScalerError as error:
        return _fail(str(error), _EXIT_ERROR)
    except OSError as error:
        place, reason = error.filename or "the output folder", error.strerror or error
        return _fail(f"{place}: {reason}. Choose a folder that can be written with --out.", _EXIT_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted; what was written until here is kept.", _EXIT_INTERRUPTED)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"halfstep: {message}", file=sys.stderr)
    return status
