"""`halfstep explain`: why a past step was skipped."""

from __future__ import annotations

import argparse
import math
import pathlib
from typing import Any

from halfstep.terminal import quiet, working
from loops.diagnose.explain.explain import explain
from loops.diagnose.explain.explanation import Explanation
from loops.record.files import to_json
from loops.run.rewind.open import open_run

_ALIKE = 2.0
"""Losses within this factor are alike."""


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    quiet()
    loop = open_run(options.folder, options.build)
    with working("explain") as progress:
        found = explain(loop, options.step, run=pathlib.Path(options.folder), progress=progress)
    print(to_json(found.to_dict()) if options.json else text(found))
    if options.picture:
        from loops.diagnose.explain.picture import picture

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
    said = ["passes" if remedy.at_scale is None else f"passes at a loss scale of {remedy.at_scale:g}"]
    if math.isfinite(remedy.loss):
        said.append(f"loss {remedy.loss:.4g}")
    if remedy.loss_ratio is not None and not 1 / _ALIKE < remedy.loss_ratio < _ALIKE:
        said.append(f"{remedy.loss_ratio:.2g} times the usual")
    if remedy.gradients_left is not None:
        said.append(f"{remedy.gradients_left:.0%} of the gradients")
    return ", ".join(said) + ("" if remedy.helps else ": no help")
