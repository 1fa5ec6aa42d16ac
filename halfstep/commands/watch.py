"""`halfstep watch`: a running run in the terminal."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "watch",
        help="follow a running run in the terminal",
        description="Shows step, loss, loss scale, headroom and skips of a run that another process trains, from the "
        "files that it appends to. It ends when the run has ended, and with Ctrl-C. In a pipe it prints a line every "
        "ten seconds.",
    )
    parser.add_argument("folder", metavar="RUN", help="the --out of halfstep train, or a program's folder")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    from halfstep.terminal import Console
    from loops.views.watch.watch import watch

    # Ctrl-C ends only the watching; the run goes on.
    with contextlib.suppress(KeyboardInterrupt):
        watch(options.folder, Console())
    return 0
