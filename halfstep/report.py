"""`halfstep report`: runs as one HTML file."""

from __future__ import annotations

import argparse

import scaler
from halfstep.terminal import finished, quiet, told


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    from loops.views.report import write_report

    if options.build and not options.explain:
        raise scaler.InvalidArgument("--build is for --explain, which takes a skip again: give both.")
    quiet()
    size = write_report(
        options.runs,
        options.out,
        explain=options.explain,
        build=options.build,
        arguments=options.arguments,
        progress=told,
    )
    finished()
    print(f"wrote {options.out}, {size:,} bytes")
