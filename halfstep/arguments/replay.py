"""What `halfstep replay` takes."""

from __future__ import annotations

from typing import Any

from halfstep.arguments import kinds
from loops.support.names import FORMS


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "replay",
        help="what other strategies would have done on a recorded run",
        description="Runs strategies over the recorded steps of a run: the scale each would have had, its skips, and "
        "what would have become zero.",
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a trace, or the folder of a run that holds one")
    parser.add_argument(
        "--strategy",
        action="append",
        required=True,
        dest="strategies",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"may be given several times: {FORMS}",
    )
    parser.add_argument("--scales", metavar="FILE", help="write a CSV of step and a column of scales for each strategy")
    parser.add_argument("--out", metavar="FIGURE", help="draw the scales into FIGURE, a PNG or SVG")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="train with each strategy from the start of the run, and print how far the replay is right, step by step; "
        "TRACE is the run's folder",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="train again from the checkpoint nearest to a step of the run, with each strategy, and lay it beside what "
        "the run did; TRACE is the run's folder",
    )
    parser.add_argument(
        "--step",
        type=kinds.count,
        metavar="N",
        help="with --live, the step: the nearest checkpoint may lie before or after it (default: the first checkpoint)",
    )
    parser.add_argument(
        "--build",
        metavar="MODULE:FUNCTION",
        help="with --validate or --live, of a program of one's own, in the current folder: function(run) returns the "
        "loops.Loop with its Checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
