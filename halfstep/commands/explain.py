"""`halfstep explain`: why a past step was skipped."""

from __future__ import annotations

import argparse
import math
import pathlib
from typing import TYPE_CHECKING, Any

from halfstep.commands.shared import add_run, count

if TYPE_CHECKING:
    from loops.diagnose.explain.explanation import Explanation

_ALIKE = 2.0
"""Losses within this factor of each other count as equal."""


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "explain",
        help="why a past step was skipped: run it again, find where it went wrong, and try remedies",
        description="Runs a past step again from the nearest checkpoint, measures every tensor, and tries remedies. "
        "Writes nothing into RUN.",
    )
    add_run(parser)
    parser.add_argument(
        "--step", type=count, metavar="N", help="the step (default: the one that the log shows went wrong)"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the magnitudes along the model into FILE, a PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    from halfstep.terminal import quiet, working
    from loops.diagnose.explain.explain import explain
    from loops.record.files import to_json
    from loops.run.rewind.rewind import open_run

    quiet()
    loop = open_run(options.folder, options.build)
    with working("explain") as progress:
        found = explain(loop, options.step, run=pathlib.Path(options.folder), progress=progress)
    print(to_json(found.to_dict()) if options.json else text(found))
    if options.picture:
        from loops.diagnose.explain.explanation import picture

        picture(found, options.picture)
    return 0


def text(found: Explanation) -> str:
    """An explanation as text."""
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
    said = ["passes" if remedy.at_scale is None else f"passes at a loss scale of {remedy.at_scale:g}"]
    if math.isfinite(remedy.loss):
        said.append(f"loss {remedy.loss:.4g}")
    if remedy.loss_ratio is not None and not 1 / _ALIKE < remedy.loss_ratio < _ALIKE:
        said.append(f"{remedy.loss_ratio:.2g} times the usual")
    if remedy.gradients_left is not None:
        said.append(f"{remedy.gradients_left:.0%} of the gradients")
    return ", ".join(said) + ("" if remedy.helps else ": no help")
