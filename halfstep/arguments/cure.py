"""What `halfstep cure` takes."""

from __future__ import annotations

from typing import Any

from halfstep.arguments import kinds
from halfstep.arguments.shared import add_run


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "cure",
        help="the fewest layers that must compute in float32 for a past step to pass",
        description="Exits with 1 where the step does not pass with every layer in float32 either, or where that could "
        "not be tried.",
    )
    add_run(parser)
    parser.add_argument("--step", type=kinds.count, required=True, metavar="N", help="the step")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
