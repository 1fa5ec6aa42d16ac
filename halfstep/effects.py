"""`halfstep study --preset`: published effects, measured again."""

from __future__ import annotations

import argparse
import json
import pathlib

import scaler
from halfstep.terminal import folded, width
from loops.study.effects import PRESETS, Effect, choose, measure, pages
from loops.support.json_values import without_nan
from loops.support.text import columns

_ALL, _LIST = "all", "list"
_INDEX = "README.md"


def run(options: argparse.Namespace) -> int:
    """Measures the preset of the options, or all, and writes their files.

    Raises:
        scaler.InvalidArgument: For an unknown preset, a task, or too few steps.
        loops.LoopError: If matplotlib or the digits are not installed.
        loops.NotWritable: If the folder cannot be written, before anything is measured.
    """
    if options.task != "digits":
        raise scaler.InvalidArgument(f"study {options.task!r} --preset: the effects are measured on digits.")
    if options.preset == _LIST:
        for preset in PRESETS:
            print(f"{preset.name}, {preset.steps} steps", folded(preset.summary, indent="  "), sep="\n")
        return 0
    presets = PRESETS if options.preset == _ALL else (choose(options.preset),)
    pages.check_drawable()
    pages.check_writable(options.out)
    measured = []
    for preset in presets:
        effect = measure(preset, options.seeds, options.steps)
        measured.append(effect)
        written = pages.write(effect, options.out)
        if not options.json:
            _show(effect, written)
    if options.preset == _ALL:
        pages.write_text(pathlib.Path(options.out) / _INDEX, pages.index(measured))
    if options.json:
        values = [without_nan(pages.to_values(effect)) for effect in measured]
        print(json.dumps(values if options.preset == _ALL else values[0], indent=1))
    return 0


def _show(effect: Effect, written: list[pathlib.Path]) -> None:
    print(effect.title, columns([effect.columns, *effect.rows], width()), sep="\n\n", end="\n\n")
    for claim in effect.claims:
        print(folded(f"{claim.verdict.lower()}: {claim.text}"))
    print(f"{effect.seconds:.0f} s; wrote {', '.join(str(path) for path in written)}")
