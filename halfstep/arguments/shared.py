"""What several commands take."""

from __future__ import annotations

import argparse


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declares RUN and --build, which tell how to have a run again."""
    parser.add_argument("folder", metavar="RUN", help="the --out of halfstep train, or a program's folder")
    parser.add_argument(
        "--build",
        metavar="MODULE:FUNCTION",
        help="of a program of one's own, in the current folder: function(run) returns the loops.Loop with its "
        "Checkpoint",
    )
