"""`halfstep lint`: what is known to hurt, before training."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile

from halfstep.statuses import EXIT_FOUND
from halfstep.terminal import folded
from loops.diagnose.lint.built import lint_built
from loops.diagnose.lint.finding import Finding
from loops.support.user_function import called


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
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
    for finding in findings:
        print(finding.layer or "all layers")
        for text in (finding.finding, f"measured: {finding.measured}", f"instead: {finding.instead}"):
            print(folded(text, indent="  "))
        print()
