"""`halfstep lab observe`: whether observing a run changes it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from halfstep.commands.shared import EXIT_FOUND, count


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("observe", help="run the same steps with and without probes, and report what differs")
    parser.add_argument("--verify", action="store_true", required=True, help="compare the weights by their digests")
    parser.add_argument(
        "--build",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or an empty folder "
        "for the run, and returns the hs.Loop",
    )
    parser.add_argument("--steps", type=count, default=10, help="steps of each run (default: 10)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    from loops.diagnose.verify import verify
    from loops.record.files import to_json
    from loops.support.user_function import called, in_empty_folders

    with in_empty_folders(lambda folder: called(options.build, folder)) as build:
        found = verify(build, options.steps)
    print(to_json({"neutral": found.neutral, **dataclasses.asdict(found)}) if options.json else found)
    return 0 if found.neutral else EXIT_FOUND
