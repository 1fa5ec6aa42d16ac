"""What `halfstep doctor` takes."""

from __future__ import annotations

from typing import Any


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("doctor", help="versions, devices, measured matmul rates, and whether float16 pays")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
