"""What `halfstep lint` takes."""

from __future__ import annotations

from typing import Any

from halfstep.statuses import EXIT_FOUND


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "lint",
        help="run each layer of a model at rising magnitudes, and say what float16 will not bear",
        epilog=f"Exit status: 0 if nothing was found that hurts, {EXIT_FOUND} if something was. Notes do not count.",
    )
    parser.add_argument(
        "--build",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or the folder of a "
        "run (here an empty one), and returns a loops.Loop, or (model, optimizer, loss, sample)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
