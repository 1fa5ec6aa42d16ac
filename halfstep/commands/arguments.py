"""Arguments that several commands share."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return value


def seed(text: str) -> int:
    """An integer in [0, 2^32)."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer in [0, 2^32)")
    return value


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declares RUN and --build, which say how to rebuild a run."""
    parser.add_argument("folder", metavar="RUN", help="the --out of halfstep train, or a program's folder")
    parser.add_argument(
        "--build",
        metavar="MODULE:FUNCTION",
        help="for a run of your own program: a function, importable from the current folder, that takes the run's "
        "folder and returns the hs.Loop with its Checkpoint",
    )
