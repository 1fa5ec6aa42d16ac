"""`halfstep tune`: a strategy's parameters, searched on recorded runs."""

from __future__ import annotations

import argparse
import dataclasses

import scaler
from halfstep.terminal import finished, quiet, told, width
from loops.record.files import to_json
from loops.replay.tune import tune


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    quiet()
    chosen = options.strategy or ["dynamic"]
    if len(chosen) > 1:
        raise scaler.InvalidArgument(
            f"--strategy {' --strategy '.join(chosen)}: tune searches the parameters of one strategy. Run it once for "
            "each."
        )
    found = tune(options.traces, chosen[0], progress=lambda done, of: told(f"tried {done} of {of}"))
    finished()
    print(to_json(dataclasses.asdict(found)) if options.json else found.text(width()))
