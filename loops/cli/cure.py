"""`halfstep cure`: the fewest layers that must compute in float32 for a past step to pass."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from loops.autopsy.explain import cure
from loops.cli import options
from loops.cli.explain import add_run, finished, quiet, told
from loops.rewind.opened import open_run
from loops.runs.run import to_json

_NO_CURE = 1


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "cure",
        help="the fewest layers that must compute in float32 for a past step to pass",
        description="Exits with 1 where the step does not pass with every layer in float32 either.",
    )
    add_run(parser)
    parser.add_argument("--step", type=options.count, required=True, metavar="N", help="the step")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    quiet()
    layers = cure(
        open_run(options.folder, options.build), options.step, run=pathlib.Path(options.folder), progress=told
    )
    finished()
    if options.json:
        print(to_json({"step": options.step, "layers": layers or [], "cured": layers is not None}))
    else:
        print(text(options.step, layers))
    return 0 if layers is not None else _NO_CURE


def text(step: int, layers: list[str] | None) -> str:
    """The cure as the lines to write."""
    if layers is None:
        return f"Step {step} does not pass with every layer in float32 either: `halfstep explain` says why."
    if not layers:
        return f"Step {step} passes as it is."
    lines = [f"Step {step} passes with {len(layers)} layer{'s' * (len(layers) > 1)} in float32:", ""]
    lines += [f'  {layer}: dtype="float32"' for layer in layers]
    return "\n".join(lines)
