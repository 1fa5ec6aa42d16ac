"""`halfstep lint`: what is known to hurt, before training."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from loops.lint.built import lint_built
from loops.lint.finding import Finding
from loops.programs import called

EXIT_FOUND = 4
"""Status where something was found that hurts."""


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "lint",
        help="run each layer of a model at rising magnitudes, and say what float16 will not bear",
        epilog=f"Exit status: 0 if nothing was found that hurts, {EXIT_FOUND} if something was. Notes do not count.",
    )
    parser.add_argument(
        "--build",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function of your program, importable from the current folder, that takes nothing, or the folder of a "
        "run (here an empty one), and returns a loops.Loop, or (model, optimizer, loss, sample)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="halfstep-lint-") as folder:
        findings = lint_built(called(options.build, pathlib.Path(folder)), options.build)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    elif findings:
        _print(findings)
    else:
        print("Nothing was found that float16 is known not to bear.")
    return EXIT_FOUND if any(not finding.is_note for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    table = rich.table.Table("layer", "what, how measured, what to write instead", box=rich.box.SIMPLE, show_lines=True)
    for finding in findings:
        text = f"{finding.finding}\nmeasured: {finding.measured}\ninstead: {finding.instead}"
        table.add_row(rich.text.Text(finding.layer or "all"), rich.text.Text(text, overflow="fold"))
    rich.console.Console().print(table)
