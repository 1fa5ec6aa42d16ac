"""Resolves traces and strategies from a user's arguments."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import scaler
from loops.record.files import trace_of
from loops.record.trace import TraceTables, read
from loops.run.strategy_text import parse_strategy
from loops.support.errors import LoopError
from loops.support.written.place import as_path

Source = str | os.PathLike | TraceTables


def tables_of(sources: Source | Sequence[Source]) -> list[tuple[str, TraceTables]]:
    """Pairs of name and trace, from files, folders of runs, or what `read` returned.

    Raises:
        LoopError: If a trace cannot be read.
        scaler.InvalidArgument: If a source is not a trace, or there is none.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike, TraceTables)) else list(sources)
    if not listed:
        raise scaler.InvalidArgument("replay(traces=[]): expected at least one trace.")
    found = []
    for number, source in enumerate(listed, 1):
        if isinstance(source, TraceTables):
            found.append((f"trace {number}", source))
        else:
            place = trace_in(as_path("replay", "traces", source))
            found.append((str(place), read(place)))
    return found


def trace_in(place: pathlib.Path) -> pathlib.Path:
    """The trace at a path: the file itself, or the one in a run's folder.

    Raises:
        LoopError: If a folder has no trace, or several without the default name.
    """
    if not place.is_dir():
        return place
    found = trace_of(place)
    if found is None:
        raise LoopError(
            f"{place}: it has no trace.arrow. Name the file, or record one: halfstep train --trace, or hs.Trace in "
            "a program."
        )
    return found


def named_strategies(strategies: Any) -> list[tuple[str, scaler.Strategy]]:
    """Pairs of name and strategy, from texts for `halfstep train --strategy`, or objects.

    Raises:
        scaler.InvalidArgument: If one is neither, if there is none, or if one is given twice.
    """
    if isinstance(strategies, str) or not isinstance(strategies, Sequence):
        strategies = [strategies]
    if not strategies:
        raise scaler.InvalidArgument("replay(strategies=[]): expected at least one, such as 'dynamic'.")
    found: list[tuple[str, scaler.Strategy]] = []
    for one in strategies:
        if isinstance(one, str):
            found.append((one, parse_strategy(one)))
        else:
            scaler.strategies.require_strategy(one, "replay")
            found.append((scaler.strategies.in_words(one), one))
    names = [name for name, _ in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise scaler.InvalidArgument(f"strategy {twice!r} is given twice: expected each once.")
    guarded = next((name for name, one in found if isinstance(one, scaler.SpikeGuard)), None)
    if guarded is not None:
        raise scaler.InvalidArgument(
            f"strategy {guarded!r}: a SpikeGuard does not move the scale: expected the strategy inside of it."
        )
    return found
