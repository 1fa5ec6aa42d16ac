"""What `halfstep tune` takes."""

from __future__ import annotations

from typing import Any

from loops.support.names import TUNED


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "tune",
        help="search a strategy's parameters on recorded runs",
        description="Searches for the parameters that lose the least share of the gradients: all of a skipped step's, "
        "and of the others what the scale makes zero. The last third decides, of the traces or of the steps of one.",
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a trace, or the folder of a run that holds one")
    parser.add_argument("--strategy", action="append", metavar="NAME", help=f"{', '.join(TUNED)} (default: dynamic)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
