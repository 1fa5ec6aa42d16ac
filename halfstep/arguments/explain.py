"""What `halfstep explain` takes."""

from __future__ import annotations

from typing import Any

from halfstep.arguments import kinds
from halfstep.arguments.shared import add_run


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "explain",
        help="why a past step was skipped: take it again, find where it began, and try what helps",
        description="Takes a past step of a run again, from its nearest checkpoint on, with every tensor measured, and "
        "tries what may help. Nothing in RUN is written.",
    )
    add_run(parser)
    parser.add_argument(
        "--step", type=kinds.count, metavar="N", help="the step (default: the one that the log shows went wrong)"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the magnitudes along the model into FILE, a PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
