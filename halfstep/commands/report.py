"""`halfstep report`: one HTML file about runs."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "report",
        help="write one HTML file about runs: curves, skips, headroom, exponents",
        description="Writes one HTML file of at most 1 MB that needs no network: the loss, the loss scale with every "
        "skip and its cause, the headroom, the exponents of each tensor, and how it was made.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the --out of halfstep train, a program's folder with its trace, its log or both, or one such file",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="(default: report.html in the run's folder, and for several runs in the current folder)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="run the skipped step where the last trouble began again, as halfstep explain does; it takes from seconds "
        "to minutes for each run",
    )
    parser.add_argument("--build", metavar="MODULE:FUNCTION", help="for --explain, as for halfstep explain")


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    import scaler
    from halfstep.terminal import quiet, working
    from loops.views.report import write_report

    if options.build and not options.explain:
        raise scaler.InvalidArgument("--build is for --explain, which runs a skipped step again: give both.")
    quiet()
    out = options.out or _beside(options.runs)
    with working("report") as progress:
        size = write_report(
            options.runs,
            out,
            explain=options.explain,
            build=options.build,
            arguments=options.arguments,
            progress=progress,
        )
    print(f"wrote {out}, {size:,} bytes")


def _beside(runs: list[str]) -> pathlib.Path:
    """Where the report of these runs goes by default."""
    place = pathlib.Path(runs[0] if len(runs) == 1 else "")
    return (place if place.is_dir() else place.parent) / "report.html"
