"""`halfstep lab tune`: a strategy's parameters, searched on recorded runs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from halfstep.commands.shared import TUNED


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
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


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
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
    print(to_json(dataclasses.asdict(found)) if options.json else found.text(width()))
