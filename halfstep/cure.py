"""`halfstep cure`: the fewest layers that must compute in float32 for a past step to pass."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING, Any

from halfstep import arguments

if TYPE_CHECKING:
    from loops.diagnose.explain.cure import Cure

_NO_CURE = 1


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "cure",
        help="the fewest layers that must compute in float32 for a past step to pass",
        description="Exits with 1 if the step does not pass with every layer in float32 either, or if that could not "
        "be tried.",
    )
    arguments.add_run(parser)
    parser.add_argument("--step", type=arguments.count, required=True, metavar="N", help="the step")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    from halfstep.terminal import quiet, working
    from loops.diagnose.explain.cure import find_cure
    from loops.record.files import to_json
    from loops.run.rewind.open import open_run

    quiet()
    loop = open_run(options.folder, options.build)
    with working("cure") as progress:
        cure = find_cure(loop, options.step, run=pathlib.Path(options.folder), progress=progress)
    print(to_json(as_dict(options.step, cure)) if options.json else text(options.step, cure))
    return 0 if cure.layers is not None else _NO_CURE


def as_dict(step: int, cure: Cure) -> dict[str, Any]:
    """The cure as `--json` prints it: `layers` is null if unknown."""
    return {
        "step": step,
        "layers": (cure.layers or []) if cure.known else None,
        "cured": cure.layers is not None,
        "at_scale": cure.at_scale,
        "untried": list(cure.untried),
        "why": cure.why,
    }


def text(step: int, cure: Cure) -> str:
    """The cure as text."""
    from loops.support.text import amount

    if not cure.known:
        return f"Step {step}: it is unknown which layers need float32. {cure.why}"
    if cure.layers is None:
        return f"Step {step} does not pass with every layer in float32 either: `halfstep explain` says why."
    at = "" if cure.at_scale is None else f", at a loss scale of {cure.at_scale:g}"
    if not cure.layers:
        return f"Step {step} passes as it is{at}."
    lines = [f"Step {step} passes with {amount(len(cure.layers), 'layer')} in float32{at}:", ""]
    lines += [f'  {layer}: dtype="float32"' for layer in cure.layers]
    if cure.untried:
        lines += ["", f"Not tried, since they cannot run in float32: {', '.join(cure.untried)}."]
    return "\n".join(lines)
