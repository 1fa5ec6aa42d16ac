"""Searches the parameters of a strategy that lose the fewest gradients on recorded steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import scaler
from loops.record.trace import TraceTables
from loops.replay.recording import Recording, recording_of
from loops.replay.replay import replay_recordings
from loops.replay.results import Replayed
from loops.replay.sources import Source, tables_of
from loops.run.strategy_text import parse_strategy
from loops.support.errors import LoopError
from loops.support.text import columns

GRIDS: dict[str, Mapping[str, Sequence[Any]]] = {
    "static": {"": [f"2**{exponent}" for exponent in range(0, 31, 2)]},
    "dynamic": {
        "initial_scale": ["2**10", "2**15", "2**20"],
        "growth_interval": [50, 100, 200, 500, 1000, 2000],
        "backoff_factor": [0.5, 0.25],
    },
    "headroom": {"headroom": [1, 2, 3, 4], "memory": [10, 30, 100, 300], "relax_interval": [100, 300, 1000]},
    "log_normal": {"deviations": [2.0, 3.09, 4.0], "mean_decay": [0.9, 0.99], "max_scale": ["2**14", "2**20", "2**30"]},
    "histogram": {"threshold": [1e-7, 1e-5, 1e-3], "period": [1, 10, 100], "dead_band": [0, 1]},
    "delayed_amax": {"margin": [0, 1, 2, 3, 4, 6], "history_length": [16, 128, 1024]},
    "smooth": {"initial_scale": ["2**10", "2**15", "2**20"], "growth_interval": [100, 300, 1000, 3000]},
}
"""The values to try for each strategy's parameters, as text; `""` is the argument without a name."""
_HELD_OUT = 3
"""One in three traces, or the last third of a single trace, is held out."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of a search.

    A cost is the share of the gradients that was lost: all those of skipped steps, and those flushed to zero in others.

    Attributes:
        best: The strategy with the lowest cost, as text; the default if that costs less on the held-out steps.
        default: The strategy without arguments, as text.
        tried: The number of candidates.
        searched: The cost of the best on the searched steps.
        held_out: The cost of the best on the held-out steps.
        default_searched: The cost of the default on the searched steps.
        default_held_out: The cost of the default on the held-out steps.
        gain: How much less the best costs than the default on the held-out steps.
        skip_rates: The skip rates of the best and the default on the held-out steps.
        flushed: The shares that the best and the default flush to zero on the held-out steps.
    """

    best: str
    default: str
    tried: int
    searched: float
    held_out: float
    default_searched: float
    default_held_out: float
    gain: float
    skip_rates: tuple[float, float]
    flushed: tuple[float, float]

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """A table, if possible no wider than `width` characters, and its conclusion."""
        found = [
            ("default", self.default, self.default_searched, self.default_held_out, 1),
            ("best", self.best, self.searched, self.held_out, 0),
        ]
        rows: list[tuple[str, ...]] = [("", "strategy", "searched", "held out", "skipped", "flushed")]
        rows += [
            (name, text, *(f"{share:.4%}" for share in (one, other, self.skip_rates[at], self.flushed[at])))
            for name, text, one, other, at in found
        ]
        gain = f"It gains {self.gain:.4%} of the gradients" if self.gain > 0 else "Nothing was better than the default"
        return f"{columns(rows, width, left=2)}\n{gain} on the held-out steps ({self.tried} were tried)."


def tune(
    traces: Source | Sequence[Source],
    strategy: str = "dynamic",
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Tuned:
    """Searches a strategy's parameters for those that lose the smallest share of the gradients.

    A skipped step loses all of its gradients, any other step those that its scale flushes to zero. The last third of
    several traces, or of the steps of a single trace, is held out. The best parameters on the rest are compared with
    the default on the held-out part, and the default is returned if it is better there.

    Args:
        traces: The argument of `replay`; the traces must have histograms.
        strategy: A key of `GRIDS`.
        progress: Called with the number of tried candidates, and their total.

    Raises:
        LoopError: If a trace lacks histograms, or something else that the strategy needs.
        scaler.InvalidArgument: For another strategy.
    """
    if strategy not in GRIDS:
        raise scaler.InvalidArgument(f"tune(strategy={strategy!r}): expected one of {', '.join(GRIDS)}.")
    searched, held_out = _parts(tables_of(traces))
    default = "static:1024" if strategy == "static" else strategy
    texts = list(dict.fromkeys([default, *_texts(strategy)]))
    candidates = [(text, parse_strategy(text)) for text in texts]
    found = replay_recordings(searched, candidates, progress).strategies
    # The first one of equal cost, and thus the default if it is among them.
    best = min(found, key=_cost)
    final = {
        one.strategy: one for one in replay_recordings(held_out, _only(candidates, best.strategy, default)).strategies
    }
    if _cost(final[best.strategy]) >= _cost(final[default]):
        best = found[0]
    winner, usual = final[best.strategy], final[default]
    return Tuned(
        best.strategy,
        default,
        len(candidates),
        _cost(best),
        _cost(winner),
        _cost(found[0]),
        _cost(usual),
        _cost(usual) - _cost(winner),
        (winner.skip_rate, usual.skip_rate),
        (winner.flushed or 0.0, usual.flushed or 0.0),
    )


def _cost(one: Replayed) -> float:
    if one.flushed is None:
        # No step with a histogram was applied; `_parts` refuses recordings without histograms.
        return 1.0
    return one.skip_rate + (1 - one.skip_rate) * one.flushed


def _only(candidates: Sequence[tuple[str, scaler.Strategy]], *names: str) -> list[tuple[str, scaler.Strategy]]:
    return [(name, strategy) for name, strategy in candidates if name in names]


def _texts(strategy: str) -> list[str]:
    grid = GRIDS[strategy]
    choices = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    named = [",".join(f"{name}={value}" if name else str(value) for name, value in one.items()) for one in choices]
    return [f"{strategy}:{arguments}" for arguments in named]


def _parts(tables: Sequence[tuple[str, TraceTables]]) -> tuple[list[Recording], list[Recording]]:
    """The recordings to search, and those to hold out."""
    if len(tables) > 1:
        count = -(-len(tables) // _HELD_OUT)
        parts: tuple[Sequence, Sequence] = (tables[:-count], tables[-count:])
    else:
        ((name, table),) = tables
        first = len(table.steps) * (_HELD_OUT - 1) // _HELD_OUT
        if not 0 < first < len(table.steps):
            raise LoopError(f"{name}: it has {len(table.steps)} steps, too few to hold some out.")
        cut = dataclasses.replace
        parts = (
            [(f"{name}, its first two thirds", cut(table, steps=table.steps.slice(0, first)))],
            [(f"{name}, its last third", cut(table, steps=table.steps.slice(first)))],
        )
    recordings = [[recording_of(table, name) for name, table in part] for part in parts]
    for part in recordings:
        if not any(len(set(one.step.tolist()) & set(one.tables.histograms["step"].to_pylist())) for one in part):
            raise LoopError(
                f"{part[0].name}: it has no histograms, so it is unknown how many gradients a scale flushes to zero. "
                "Record them more often: halfstep train --trace 10, or loops.Trace(path, every=10)."
            )
    return recordings[0], recordings[1]
