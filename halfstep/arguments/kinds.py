"""Argument types the subcommands share."""

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
