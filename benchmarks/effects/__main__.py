"""Published effects, measured again: `python -m benchmarks.effects NAME`, from a clone.

python -m benchmarks.effects list                 # what there is
python -m benchmarks.effects skip-rate            # benchmarks/results/effects/skip-rate.md, .json and .svg again
python -m benchmarks.effects all --out elsewhere  # all of them, with an index: twenty minutes
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import loops
import scaler
from benchmarks.effects import EXPERIMENTS, Effect, choose, measure, pages
from halfstep.commands import shared
from halfstep.terminal import folded, width
from loops.support.drawing import require_matplotlib
from loops.support.json_values import without_nan
from loops.support.text import columns

_ALL, _LIST = "all", "list"
_INDEX = "README.md"


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status: 1 with one line if nothing can be measured or written."""
    options = _parser().parse_args(words)
    try:
        if options.name == _LIST:
            for one in EXPERIMENTS:
                print(f"{one.name}, {one.steps} steps", folded(one.summary, indent="  "), sep="\n")
        else:
            _run(options)
    except (scaler.InvalidArgument, loops.LoopError, loops.NotWritable) as error:
        print(f"effects: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    """Measures the effect of the options, or all, and writes their files, if they can be drawn and written."""
    experiments = EXPERIMENTS if options.name == _ALL else (choose(options.name),)
    require_matplotlib()
    pages.check_writable(options.out)
    measured = []
    for experiment in experiments:
        effect = measure(experiment, options.seeds, options.steps)
        measured.append(effect)
        written = pages.write(effect, options.out)
        if not options.json:
            _show(effect, written)
    if options.name == _ALL:
        pages.write_text(pathlib.Path(options.out) / _INDEX, pages.index(measured))
    if options.json:
        values = [without_nan(dataclasses.asdict(effect)) for effect in measured]
        print(json.dumps(values if options.name == _ALL else values[0], indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.effects", description="Measures a published effect again.")
    parser.add_argument("name", help=f"one of {', '.join(one.name for one in EXPERIMENTS)}; or list, or all")
    parser.add_argument("--seeds", type=shared.count, help="(default: the effect's own number)")
    parser.add_argument("--steps", type=shared.count, help="batches a run (default: the effect's own number)")
    parser.add_argument("--out", default="benchmarks/results/effects", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _show(effect: Effect, written: list[pathlib.Path]) -> None:
    print(effect.title, columns([effect.columns, *effect.rows], width()), sep="\n\n", end="\n\n")
    for claim in effect.claims:
        print(folded(f"{claim.verdict.lower()}: {claim.text}"))
    print(f"{effect.seconds:.0f} s; wrote {', '.join(str(path) for path in written)}")


if __name__ == "__main__":
    sys.exit(main())
