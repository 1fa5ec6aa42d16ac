"""What `halfstep study` takes."""

from __future__ import annotations

from typing import Any

from halfstep.arguments import kinds
from halfstep.statuses import EXIT_ERROR, EXIT_SOME_FAILED
from loops.support.names import EFFECTS, FORMS, IMAGE_TASKS, SETUPS

STEPS = 400
"""Of a run, where --steps is not given."""


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "study",
        help="compare precisions and scalings on a task, with a report",
        epilog="A run that fails, as one whose scaler is stuck does, does not end the others: the report says which "
        "failed, where and why. Exit status: 0 if all runs finished, "
        f"{EXIT_SOME_FAILED} if some failed, {EXIT_ERROR} if none of what was compared finished, or if nothing "
        "could be written.",
    )
    parser.add_argument(
        "task",
        nargs="?",
        default="digits",
        metavar="TASK",
        help=f"{' or '.join(IMAGE_TASKS)}, the tasks of images (default: digits)",
    )
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="NAME",
        help=f"one of {', '.join(SETUPS)}; may be given several times (default: all)",
    )
    compared.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="compare strategies in place of set-ups, on mixed float16 and beside float32; may be given several times: "
        + FORMS,
    )
    compared.add_argument(
        "--preset",
        metavar="NAME",
        help=f"measure a published effect in place of a comparison, one of {', '.join(EFFECTS)}; "
        "or list, which shows them, or all. Writes NAME.md, NAME.json and NAME.png",
    )
    parser.add_argument(
        "--steps", type=kinds.count, help=f"batches a run (default: {STEPS}; each preset has its own number)"
    )
    parser.add_argument("--seeds", type=kinds.count, default=3, help="runs a set-up (default: %(default)s)")
    parser.add_argument("--out", default="study", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
