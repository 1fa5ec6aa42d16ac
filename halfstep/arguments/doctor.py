"""What `halfstep doctor` takes."""

from __future__ import annotations

from typing import Any


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="versions, devices, measured matmul rates, and whether float16 pays; with --model, where the time and the "
        "memory of its training step go",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or the folder of a "
        "run (here an empty one), and returns a loops.Loop, or (model, optimizer, loss, sample)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="with --model: draw its memory into FILE, such as memory.png or memory.html"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
