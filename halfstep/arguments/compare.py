"""What `halfstep compare` takes."""

from __future__ import annotations

from typing import Any


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "compare",
        help="where two runs part, tensor by tensor, by how much, and which is closer to float32",
        description="Compares the largest magnitude of each tensor that the traces of both runs have, gradients "
        "divided by the loss scale, and the losses. It tells something of the arithmetic where both began with the "
        "same weights and took the same batches. The runs are aligned by applied updates, and it says how many batches "
        "each lost to skipped steps; runs that do not record what was applied are aligned by steps.",
    )
    parser.add_argument("first", metavar="RUN", help="the --out of halfstep train, a program's folder, or one file")
    parser.add_argument("second", metavar="RUN", help="the run to compare it with")
    parser.add_argument("reference", metavar="FLOAT32", nargs="?", help="the same run in float32, if neither is")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
