"""`halfstep explain`: why a past step was skipped."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from typing import Any

import tensorflow as tf

from loops.autopsy.explain import explain
from loops.autopsy.explanation import Explanation
from loops.cli import options
from loops.rewind.opened import open_run
from loops.runs.run import to_json


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "explain",
        help="why a past step was skipped: take it again, find where it began, and try what helps",
        description="Takes a past step of a run again, from its nearest checkpoint on, with every tensor measured, and "
        "tries what may help. Nothing in RUN is written.",
    )
    add_run(parser)
    parser.add_argument(
        "--step", type=options.count, metavar="N", help="the step (default: the one that the log shows went wrong)"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the magnitudes along the model into FILE, a PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declares RUN and --build, which tell how to have a run again."""
    parser.add_argument("folder", metavar="RUN", help="the --out of halfstep train, or a program's folder")
    parser.add_argument(
        "--build",
        metavar="MODULE:FUNCTION",
        help="of a program of one's own, in the current folder: function(run) returns the loops.Loop with its "
        "Checkpoint",
    )


def quiet() -> None:
    """Keeps TensorFlow from warning of a step that is traced again and again, as an autopsy does it."""
    tf.get_logger().setLevel("ERROR")


def told(text: str) -> None:
    """Progress, on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def finished() -> None:
    """Clears the line of progress."""
    if sys.stderr.isatty():
        print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)


def _run(options: argparse.Namespace) -> int:
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
