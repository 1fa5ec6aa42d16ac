"""What `halfstep train` takes."""

from __future__ import annotations

from typing import Any

from halfstep.arguments import kinds
from loops.support.names import FORMS, POLICIES, TASKS


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("train", help="train one task and write DIR/summary.json and DIR/steps.jsonl")
    parser.add_argument("task", metavar="TASK", help=f"{', '.join(TASKS[:-1])} or {TASKS[-1]}")
    parser.add_argument(
        "--policy", default="mixed_float16", help=f"Keras dtype policy: {', '.join(POLICIES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--strategy",
        default="dynamic",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{FORMS} (default: %(default)s)",
    )
    parser.add_argument("--steps", type=kinds.count, default=400, help="batches to take (default: %(default)s)")
    parser.add_argument("--seed", type=kinds.seed, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", default="run", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--checkpoint-every",
        type=kinds.count,
        metavar="N",
        help="save DIR/checkpoints every N steps (default: never)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint; start from the beginning if there is none",
    )
    parser.add_argument(
        "--trace",
        type=kinds.count,
        nargs="?",
        const=100,
        metavar="EVERY",
        help="record DIR/trace.arrow, which halfstep replay reads, with the histograms of every EVERY-th step (100)",
    )
    parser.add_argument(
        "--workers",
        type=kinds.count,
        default=1,
        metavar="N",
        help="train in N processes on the CPUs of this machine, each with an equal share of every batch; on several "
        "machines start the command on each, without this option and with TF_CONFIG set (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=kinds.count,
        default=300,
        metavar="SECONDS",
        help="how long workers wait for each other at the start (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
