"""Commands that run other strategies over recorded runs: `lab replay` and `lab tune`."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from halfstep.commands.shared import FORMS, TUNED, count


def add_replay(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "replay",
        help="what other strategies would have done on a recorded run",
        description="Runs strategies over the recorded steps of a run: the loss scales that each would have used, its "
        "skips, and the share of gradients it would have flushed to zero. From the first skip on that may differ from "
        "the run's, these are estimates, with intervals if enough runs are known.",
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
    parser.add_argument(
        "--validate",
        action="store_true",
        help="train with each strategy from the start of the run, and print how far the replay is right, step by step; "
        "TRACE is the run's folder",
    )
    parser.add_argument(
        "--validated",
        action="append",
        default=[],
        metavar="FILE",
        help="what --validate --json printed of runs of this problem; may be given several times: from nine of its "
        "runs on, the figures have intervals, as from the traces of six seeds",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="train again from the checkpoint nearest to a step of the run, with each strategy, and compare with what "
        "the run did; TRACE is the run's folder",
    )
    parser.add_argument(
        "--step",
        type=count,
        metavar="N",
        help="with --live, the step: the nearest checkpoint may lie before or after it (default: the first checkpoint)",
    )
    parser.add_argument(
        "--build",
        metavar="MODULE:FUNCTION",
        help="with --validate or --live, for a run of your own program: a function, importable from the current "
        "folder, that takes the run's folder and returns the hs.Loop with its Checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_replay)


def _replay(options: argparse.Namespace) -> None:
    import scaler
    from halfstep.terminal import quiet, width, working
    from loops.record.files import to_json
    from loops.replay.intervals import differences_in
    from loops.replay.recording import recording_of, tables_of
    from loops.replay.replay import replay_recordings
    from loops.replay.results import replay_figure, write_scales
    from loops.replay.stepping import named_strategies
    from loops.replay.train_again import live, validate
    from loops.support.drawing import save
    from loops.support.text import amount

    quiet()
    strategies = named_strategies(options.strategies)
    if len(options.traces) > 1 and (options.scales or options.out):
        raise scaler.InvalidArgument("--scales and --out write about one trace: expected one TRACE, not several.")
    if (options.validate or options.live) and len(options.traces) > 1:
        raise scaler.InvalidArgument("--validate and --live train one run again: expected one TRACE, its folder.")
    if options.build and not (options.validate or options.live):
        raise scaler.InvalidArgument("--build says how to train again: expected --validate or --live with it.")
    if options.step and not options.live:
        raise scaler.InvalidArgument("--step says where to begin: expected --live with it.")
    if options.live and (options.validate or options.validated or options.scales or options.out):
        raise scaler.InvalidArgument("--live cannot be combined with --validate, --validated, --scales or --out.")
    run = pathlib.Path(options.traces[0])
    if options.live:
        with working("replay") as progress:
            lived = live(run, strategies, options.step, options.build, progress)
        print(to_json(lived.to_dict()) if options.json else lived.text(width()))
        return
    recordings = [recording_of(tables, name) for name, tables in tables_of(options.traces)]
    differences = differences_in(options.validated)
    with working("replay") as progress:
        found = replay_recordings(
            recordings, strategies, lambda done, of: progress(f"replayed {done} of {of} strategies"), differences
        )
    said, lines = found.to_dict(), [f"{amount(found.steps, 'step')}\n\n{found.text(width())}"]
    if options.validate:
        with working("replay") as progress:
            validated = validate(recordings[0], run, strategies, options.build, progress, differences)
        said["strategies"] = [one.to_dict() for one in validated]
        lines += ["", "trained again:", *map(str, validated)]
    if options.scales:
        write_scales(found, options.scales)
    if options.out:
        scales = {one.strategy: one.scales for one in found.strategies}
        save(replay_figure(found.numbers, recordings[0].limits.decided, scales), options.out)
    print(to_json(said) if options.json else "\n".join(lines))


def add_tune(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "tune",
        help="search a strategy's parameters on recorded runs",
        description="Searches for the parameters that lose the smallest share of the gradients: all gradients of "
        "skipped steps, and those that the scale makes zero in other steps. The last third of the traces, or of the "
        "steps of a single trace, decides. The default stays unless another is better beyond the intervals of replay.",
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a trace, or the folder of a run that holds one")
    parser.add_argument("--strategy", action="append", metavar="NAME", help=f"{', '.join(TUNED)} (default: dynamic)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> None:
    import scaler
    from halfstep.terminal import quiet, width, working
    from loops.record.files import to_json
    from loops.replay.tune import tune

    quiet()
    chosen = options.strategy or ["dynamic"]
    if len(chosen) > 1:
        raise scaler.InvalidArgument(
            f"--strategy {' --strategy '.join(chosen)}: tune searches the parameters of one strategy. Run it once for "
            "each."
        )
    with working("tune") as progress:
        found = tune(options.traces, chosen[0], progress=lambda done, of: progress(f"tried {done} of {of}"))
    print(to_json(found.to_dict()) if options.json else found.text(width()))
