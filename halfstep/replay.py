"""`halfstep replay`: what other strategies would have done on a recorded run."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import scaler
from halfstep.terminal import finished, quiet, told, width
from loops.record.files import to_json
from loops.replay.live import live
from loops.replay.recording import Recording, recording_of
from loops.replay.replay import replay_recordings
from loops.replay.results import Replay
from loops.replay.scales_file import write_scales
from loops.replay.sources import named_strategies, tables_of
from loops.replay.validate import Validated, validate
from loops.support.errors import LoopError, NotWritable
from loops.support.plurals import amount


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    quiet()
    strategies = named_strategies(options.strategies)
    if len(options.traces) > 1 and (options.scales or options.out):
        raise scaler.InvalidArgument("--scales and --out are of one trace: expected one TRACE, not several.")
    if (options.validate or options.live) and len(options.traces) > 1:
        raise scaler.InvalidArgument("--validate and --live are of one run: expected one TRACE, its folder.")
    if options.build and not (options.validate or options.live):
        raise scaler.InvalidArgument("--build says how to train again: expected --validate or --live with it.")
    if options.step and not options.live:
        raise scaler.InvalidArgument("--step says where to begin: expected --live with it.")
    if options.live:
        _live(options, strategies)
        return
    recordings = [recording_of(tables, name) for name, tables in tables_of(options.traces)]
    found = replay_recordings(recordings, strategies, lambda done, of: told(f"replayed {done} of {of} strategies"))
    finished()
    validated = _validated(options, recordings[0], strategies) if options.validate else []
    if options.scales:
        write_scales(found, options.scales)
    if options.out:
        _draw(found, recordings[0], pathlib.Path(options.out))
    said = found.to_dict()
    if validated:
        said["strategies"] = [one.to_dict() for one in validated]
    table = f"{amount(found.steps, 'step')}\n\n{found.text(width())}"
    print(to_json(said) if options.json else "\n".join([table, *_told(validated)]))


def _live(options: argparse.Namespace, strategies: Sequence[tuple[str, scaler.Strategy]]) -> None:
    if options.validate or options.scales or options.out:
        raise scaler.InvalidArgument("--live prints two runs: expected it without --validate, --scales and --out.")
    found = live(
        pathlib.Path(options.traces[0]),
        strategies,
        options.step,
        options.build,
        lambda name, done, of: told(f"{name}: {done:,} of {of:,}"),
    )
    finished()
    print(to_json(found.to_dict()) if options.json else found.text(width()))


def _validated(
    options: argparse.Namespace, recording: Recording, strategies: Sequence[tuple[str, scaler.Strategy]]
) -> list[Validated]:
    found = validate(
        recording,
        pathlib.Path(options.traces[0]),
        strategies,
        options.build,
        lambda name, done, of: told(f"trained {done:,} of {of:,} steps with {name}"),
    )
    finished()
    return found


def _told(validated: Sequence[Validated]) -> list[str]:
    return ["", "trained again:", *map(str, validated)] if validated else []


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
