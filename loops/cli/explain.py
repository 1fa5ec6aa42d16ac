"""`halfstep explain`: why a past step was skipped."""

from __future__ import annotations

import argparse
import math
import pathlib
from typing import Any

from loops.autopsy.explain import explain
from loops.autopsy.explanation import Explanation
from loops.cli.terminal import finished, quiet, told
from loops.rewind.opened import open_run
from loops.runs.run import to_json


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    quiet()
    loop = open_run(options.folder, options.build)
    found = explain(loop, options.step, run=pathlib.Path(options.folder), progress=told)
    finished()
    print(to_json(found.to_dict()) if options.json else text(found))
    if options.picture:
        from loops.autopsy.picture import picture

        picture(found, options.picture)
    return 0


def text(found: Explanation) -> str:
    """An explanation as lines for a person."""
    lines = [found.sentence]
    if found.remedies:
        width = max(len(remedy.name) for remedy in found.remedies)
        lines += ["", "tried"]
        lines += [f"  {remedy.name:{width}}  {_did(remedy)}" for remedy in found.remedies]
    return "\n".join(lines)


def _did(remedy: Any) -> str:
    if not remedy.tried:
        return "could not be tried"
    if not remedy.finite:
        return "fails"
    scale = "" if remedy.at_scale is None else f" at a loss scale of {remedy.at_scale:g}"
    return f"passes{scale}" + (f", loss {remedy.loss:.4g}" if math.isfinite(remedy.loss) else "")
