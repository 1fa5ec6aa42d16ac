"""Commands that take a past step again: `explain`, and `lab cure`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from halfstep.commands.shared import add_run, count

if TYPE_CHECKING:
    from loops.diagnose.explain.cure import Cure
    from loops.diagnose.explain.cure_in_format import FormatCure
    from loops.diagnose.explain.explanation import Explanation
    from loops.loop.loop import Loop

_ALIKE = 2.0
"""Losses within this factor of each other count as equal."""
_NO_CURE = 1


def add_explain(commands: Any) -> None:
    """Declares the command."""
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
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    from halfstep.terminal import quiet, working
    from loops.diagnose.explain.explain import explain
    from loops.record.files import to_json
    from loops.run.rewind.rewind import open_run

    quiet()
    loop = open_run(options.folder, options.build)
    with working("explain") as progress:
        found = explain(loop, options.step, run=pathlib.Path(options.folder), progress=progress)
    print(to_json(found.to_dict()) if options.json else text_of_explanation(found))
    if options.picture:
        from loops.diagnose.explain.explanation import picture

        picture(found, options.picture)
    return 0


def text_of_explanation(found: Explanation) -> str:
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


def add_cure(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "cure",
        help="the fewest layers that must compute in float32 for a past step to pass",
        description="Exits with 1 if the step does not pass with every layer in float32 either, if that could not be "
        "tried, or if no layer may be in the format.",
    )
    add_run(parser)
    parser.add_argument("--step", type=count, required=True, metavar="N", help="the step")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="ask instead which layers may be in this format, such as float8_e4m3fn: docs/formats.md lists them",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_cure)


def _cure(options: argparse.Namespace) -> int:
    from halfstep.terminal import quiet, working
    from loops.diagnose.explain.cure import find_cure
    from loops.record.files import to_json
    from loops.run.rewind.rewind import open_run

    quiet()
    loop = open_run(options.folder, options.build)
    if options.format is not None:
        return _in_format(loop, options)
    with working("cure") as progress:
        cure = find_cure(loop, options.step, run=pathlib.Path(options.folder), progress=progress)
    print(to_json(as_dict(options.step, cure)) if options.json else text_of_cure(options.step, cure))
    return 0 if cure.layers is not None else _NO_CURE


def _in_format(loop: Loop, options: argparse.Namespace) -> int:
    from halfstep.terminal import working
    from loops.diagnose.explain.cure_in_format import find_format_cure
    from loops.record.files import to_json

    folder = pathlib.Path(options.folder)
    with working("cure") as progress:
        found = find_format_cure(loop, options.step, options.format, run=folder, progress=progress)
    as_json = {"step": options.step, **dataclasses.asdict(found)}
    print(to_json(as_json) if options.json else text_of_format(options.step, found))
    return 0 if found.inside else _NO_CURE


def text_of_format(step: int, found: FormatCure) -> str:
    """What a format does to a step, as text."""
    from loops.support.text import amount

    if not found.inside:
        head = (
            f"Step {step}: no layer may be in {found.format}. Alone each moves the gradients too far: {_limits(found)}."
        )
    else:
        layers = amount(len(found.inside) + len(found.left_out), "layer")
        which = f"{len(found.inside)} of {layers}" if found.left_out else f"all of {layers}"
        each = [f"by {one.error:.1%} of {name!r}" for name, one in found.parts.items()]
        moved = _and(each) if each else f"by {found.error:.1%}"
        head = (
            f"Step {step}: {which} may be in {found.format}. Together they move the gradients {moved}: "
            f"{_limits(found)}."
        )
    lines = [head]
    if found.joint:
        lines += ["", f"One scaler decides about {_and(map(repr, found.joint))}, so their gradients are judged as one."]
    if found.inside and found.left_out:
        lines += ["", "Leave out, with how far each moves the gradients alone:", ""]
        lines += [f"  {path}  {_alone(found, path)}" for path in found.left_out]
        lines += ["", *_calls(found)]
    if found.not_tried:
        lines += ["", "Not tried:", ""]
        lines += [f"  {path}  {why}" for path, why in found.not_tried.items()]
    return "\n".join(lines)


def _limits(found: FormatCure) -> str:
    """How far gradients may move, and why."""
    if not found.parts:
        return f"{found.limit:.1%} of their norm are allowed, and the noise of the batch is {found.noise:.1%}"
    limits = _and(f"{one.limit:.1%} of the norm of {name!r}" for name, one in found.parts.items())
    noises = _and(f"{one.noise:.1%} in {name!r}" for name, one in found.parts.items())
    return f"{limits} are allowed, and the noise of the batch is {noises}"


def _alone(found: FormatCure, path: str) -> str:
    """How far a layer that is left out moves the gradients alone, and whether it may be in the format then."""
    parts = [f"{one.alone[path]:.1%} of {name!r}" for name, one in found.parts.items()]
    moves = _and(parts) if parts else f"{found.alone[path]:.1%}"
    return f"{moves}; alone it may be" if path in found.may_alone else moves


def _calls(found: FormatCure) -> list[str]:
    """The calls that put the layers inside into the format, one for each model."""
    emulated = f"hs.formats.emulated({found.format!r})"
    if not found.models:
        return [f"{emulated}(model, only={found.inside!r})"]
    inside = {
        name: [path.removeprefix(f"{name}/") for path in found.inside if path.startswith(f"{name}/")]
        for name in found.models
    }
    return [f"{emulated}({name}, only={paths!r})" for name, paths in inside.items() if paths]


def _and(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def as_dict(step: int, cure: Cure) -> dict[str, Any]:
    """The cure as `--json` prints it: `layers` is null if unknown."""
    return {
        "step": step,
        "layers": (cure.layers or []) if cure.known else None,
        "cured": cure.layers is not None,
        "at_scale": cure.at_scale,
        "untried": list(cure.untried),
        "why": cure.why,
        "no_help": cure.no_help,
    }


def text_of_cure(step: int, cure: Cure) -> str:
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
    if cure.no_help:
        lines += ["", f"That is no help: {cure.no_help}. `halfstep explain` says more."]
    if cure.untried:
        lines += ["", f"Not tried, since they cannot run in float32: {', '.join(cure.untried)}."]
    return "\n".join(lines)
