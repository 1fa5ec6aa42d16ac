"""What `halfstep inspect` takes."""

from __future__ import annotations

from typing import Any


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "inspect", help="show what a run's newest checkpoint holds, without building the model"
    )
    parser.add_argument("directory", metavar="DIR", help="a folder of checkpoints, or the --out of a run")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
