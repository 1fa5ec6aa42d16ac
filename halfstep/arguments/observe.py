"""What `halfstep observe` takes."""

from __future__ import annotations

from typing import Any

from halfstep.arguments import kinds


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("observe", help="run the same steps with and without probes, and say what they change")
    parser.add_argument("--verify", action="store_true", required=True, help="compare the weights by their digests")
    parser.add_argument(
        "--build",
        required=True,
        metavar="MODULE:FUNCTION",
        help="of a program of one's own, in the current folder: function(), or function(run) that is given an "
        "empty folder, returns the loops.Loop",
    )
    parser.add_argument("--steps", type=kinds.count, default=10, help="how many to run each time (default: 10)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
