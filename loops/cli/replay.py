"""`halfstep replay`: what other strategies would have done on a recorded run."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import scaler
from loops.cli.explain import finished, quiet, told
from loops.errors import LoopError, NotWritable
from loops.replay.recording import Recording, recording_of
from loops.replay.replay import replay_recordings
from loops.replay.results import Replay
from loops.replay.scales_file import write_scales
from loops.replay.sources import named_strategies, tables_of
from loops.runs.run import to_json
from loops.runs.strategy_text import FORMS


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "replay",
        help="what other strategies would have done on a recorded run",
        description="Runs strategies over the recorded steps of a run: the scale each would have had, its skips, and "
        "what would have become zero.",
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a trace, or the folder of a run that holds one")
    parser.add_argument(
        "--strategy",
        action="append",
        required=True,
        dest="strategies",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"may be given several times: {FORMS}",
    )
    parser.add_argument("--scales", metavar="FILE", help="write a CSV of step and a column of scales for each strategy")
    parser.add_argument("--out", metavar="FIGURE", help="draw the scales into FIGURE, a PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    quiet()
    strategies = named_strategies(options.strategies)
    if len(options.traces) > 1 and (options.scales or options.out):
        raise scaler.InvalidArgument("--scales and --out are of one trace: expected one TRACE, not several.")
    recordings = [recording_of(tables, name) for name, tables in tables_of(options.traces)]
    found = replay_recordings(recordings, strategies, lambda done, of: told(f"replayed {done} of {of} strategies"))
    finished()
    if options.scales:
        write_scales(found, options.scales)
    if options.out:
        _draw(found, recordings[0], pathlib.Path(options.out))
    print(to_json(found.to_dict()) if options.json else f"{found.steps:,} steps\n\n{found}")


def _draw(found: Replay, recording: Recording, path: pathlib.Path) -> None:
    try:
        from loops.replay.figure import replay_figure
    except ImportError as error:
        raise LoopError('a figure needs matplotlib: pip install "halfstep[study]"') from error
    scales = {one.strategy: one.scales for one in found.strategies}
    try:
        replay_figure(found.numbers, recording.limits.decided, scales).savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise NotWritable(
            f"--out {path}: the figure cannot be written ({error}). Name a .png, .svg or .pdf."
        ) from error
