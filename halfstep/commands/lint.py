"""`halfstep lint`: known float16 problems of a model, found before training."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

from halfstep.commands.shared import EXIT_FOUND

if TYPE_CHECKING:
    from loops.diagnose.lint.subject import Finding


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "lint",
        help="run each layer of a model at rising magnitudes, and report float16 problems",
        epilog=f"Exit status: 0 if no problem was found, {EXIT_FOUND} if any was. Notes do not count as problems.",
    )
    parser.add_argument(
        "--build",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or the folder of a "
        "run (here an empty one), and returns an hs.Loop, or (model, optimizer, loss, sample)",
    )
    parser.add_argument("--xla", action="store_true", help="also name the layers that XLA cannot compile")
    parser.add_argument(
        "--format", metavar="NAME", help="also name the layers that lose too much in a format such as float8_e4m3fn"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    from loops.diagnose.lint import lint_program
    from loops.support.user_function import called

    with tempfile.TemporaryDirectory(prefix="halfstep-lint-") as folder:
        program = called(options.build, pathlib.Path(folder))
        findings = lint_program(program, options.build, xla=options.xla, format=options.format)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    elif findings:
        _print(findings)
    else:
        print("No known problems with float16 were found.")
    return EXIT_FOUND if any(not finding.is_note for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    from halfstep.terminal import folded

    for finding in findings:
        print(finding.layer or "all layers")
        for text in (finding.finding, f"measured: {finding.measured}", f"instead: {finding.instead}"):
            print(folded(text, indent="  "))
        print()
