"""Searches the parameters of a strategy that lose the fewest gradients on recorded steps."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import scaler
from loops.record import as_recorded
from loops.record.trace import TraceTables
from loops.replay.intervals import Range
from loops.replay.recording import Recording, Source, recording_of, tables_of
from loops.replay.replay import MOST_SKIPPED, replay_recordings
from loops.replay.results import Replayed, Tabled
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
class Tuned(Tabled):
    """The result of a search.

    A cost is the share of the gradients that was lost: all those of skipped steps, and those flushed to zero in others.

    Attributes:
        best: The strategy with the lowest cost, as text; the default unless it is cheaper beyond the intervals.
        default: The strategy without arguments, as text.
        tried: The number of candidates.
        searched: The cost of the best on the searched steps.
        held_out: The cost of the best on the held-out steps.
        default_searched: The cost of the default on the searched steps.
        default_held_out: The cost of the default on the held-out steps.
        gain: How much less the best costs than the default on the held-out steps.
        gain_interval: The least and the largest gain that the intervals of both allow; the gain twice if neither has a
            skip that differs from the recorded runs'. None if the default is no choice and its cost is unknown.
        remark: What else there is to say, as a sentence; or None.
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
    gain_interval: Range | None
    remark: str | None
    skip_rates: tuple[float, float]
    flushed: tuple[float, float]

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
        lines = [columns(rows, width, left=2), f"{self._gain()} on the held-out steps ({self.tried} were tried)."]
        return "\n".join(lines if self.remark is None else [*lines, self.remark])

    def _gain(self) -> str:
        if self.best == self.default:
            return "Nothing was better than the default beyond the intervals"
        if self.gain_interval is None:
            return "How much it gains is unknown"
        low, high = self.gain_interval
        between = "" if low == high else f", {low:.4%} to {high:.4%} by the intervals,"
        return f"It gains {self.gain:.4%} of the gradients{between}"


def tune(
    traces: Source | Sequence[Source],
    strategy: str = "dynamic",
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Tuned:
    """Searches a strategy's parameters for those that lose the smallest share of the gradients.

    A skipped step loses all of its gradients, any other step those that its scale flushes to zero. The last third of
    several traces, or of the steps of a single trace, is held out. The best parameters on the rest are compared with
    the default on the held-out part. They are returned if they cost less there beyond the intervals of both, see
    `replay`, and the default otherwise. A static scale that may skip more than 1% of a run's steps is never returned.

    Args:
        traces: The argument of `replay`; the traces must have histograms.
        strategy: A key of `GRIDS`.
        progress: Called with the number of tried candidates, and their total.

    Raises:
        LoopError: If a trace lacks histograms, or something else that the strategy needs, or if each static scale may
            skip too much.
        scaler.InvalidArgument: For another strategy.
    """
    if strategy not in GRIDS:
        raise scaler.InvalidArgument(f"tune(strategy={strategy!r}): expected one of {', '.join(GRIDS)}.")
    searched, held_out = _parts(tables_of(traces))
    default = "static:1024" if strategy == "static" else strategy
    texts = list(dict.fromkeys([default, *_texts(strategy)]))
    replayed = replay_recordings([*searched, *held_out], [(text, parse_strategy(text)) for text in texts], progress)
    found = [
        _Candidate(one.strategy, one.runs[: len(searched)], one.runs[len(searched) :]) for one in replayed.strategies
    ]
    usual, *_ = found
    allowed = [
        one
        for one in found
        if strategy != "static" or all(run.highest_skip_rate <= MOST_SKIPPED for run in (*one.searched, *one.held_out))
    ]
    if not allowed:
        raise LoopError(
            f"each static scale of the {len(found)} that were tried may skip more than {MOST_SKIPPED:.0%} of the steps "
            f"of a run. Record at a scale that skips nothing, or use a strategy that moves."
        )
    # The first one of equal cost, and thus the default if it is among them.
    best = min(allowed, key=lambda one: _cost(one.searched))
    gain, interval = _cost(usual.held_out) - _cost(best.held_out), _gain_interval(best, usual)
    remark = None
    if usual not in allowed:
        remark = f"{default} may skip more than {MOST_SKIPPED:.0%} of the steps of a run."
    elif best is not usual and (interval is None or interval[0] <= 0):
        remark = _unsure(best, gain, interval, replayed.lacking)
        best, gain, interval = usual, 0.0, (0.0, 0.0)
    return Tuned(
        best.name,
        default,
        len(found),
        _cost(best.searched),
        _cost(best.held_out),
        _cost(usual.searched),
        _cost(usual.held_out),
        gain,
        interval,
        remark,
        (_skip_rate(best.held_out), _skip_rate(usual.held_out)),
        (_flushed(best.held_out) or 0.0, _flushed(usual.held_out) or 0.0),
    )


class _Candidate(NamedTuple):
    """A strategy's results on each of the searched and of the held-out runs."""

    name: str
    searched: Sequence[Replayed]
    held_out: Sequence[Replayed]


def _gain_interval(best: _Candidate, usual: _Candidate) -> Range | None:
    # Where a searched run differs and has no interval, the held-out steps are not those of a run that went on.
    if any(_cost_interval(one.searched) is None for one in (best, usual)):
        return None
    ours, theirs = _cost_interval(best.held_out), _cost_interval(usual.held_out)
    return None if ours is None or theirs is None else (theirs[0] - ours[1], theirs[1] - ours[0])


def _unsure(best: _Candidate, gain: float, interval: Range | None, lacking: str | None) -> str | None:
    if gain <= 0:
        return None
    seems = f"{best.name} seems to gain {gain:.4%}, but"
    if interval is None:
        return f"{seems} no gain can be stated. {lacking}"
    return f"{seems} the intervals allow {interval[0]:.4%} to {interval[1]:.4%}."


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
        run = as_recorded(table)
        first = len(run) * (_HELD_OUT - 1) // _HELD_OUT
        if not 0 < first < len(run):
            raise LoopError(f"{name}: it has {len(run)} steps, too few to hold some out.")
        parts = (
            [(f"{name}, its first two thirds", run.where(slice(first)))],
            [(f"{name}, its last third", run.where(slice(first, None)))],
        )
    recordings = [[recording_of(table, name) for name, table in part] for part in parts]
    for part in recordings:
        if not any(len(one.entries.row) for one in part):
            raise LoopError(
                f"{part[0].name}: it has no histograms, so it is unknown how many gradients a scale flushes to zero. "
                "Record them more often: halfstep train --trace 10, or hs.Trace(path, every=10)."
            )
    return recordings[0], recordings[1]


def _cost(runs: Sequence[Replayed]) -> float:
    """All gradients of skipped steps, and those of the others that are flushed to zero, as a share of all."""
    share = _flushed(runs)
    if share is None:
        # No step with a histogram was applied; traces without histograms are refused before.
        return 1.0
    return _lost(_skip_rate(runs), share)


def _skip_rate(runs: Sequence[Replayed]) -> float:
    """The share of skipped steps."""
    return sum(run.skips for run in runs) / sum(len(run.scales) for run in runs)


def _flushed(runs: Sequence[Replayed]) -> float | None:
    """The mean share of flushed gradients over the runs of which it is known; None if there is none."""
    known = [(run.flushed, len(run.scales)) for run in runs if run.flushed is not None]
    return sum(share * steps for share, steps in known) / sum(steps for _, steps in known) if known else None


def _cost_interval(runs: Sequence[Replayed]) -> Range | None:
    """The lowest and the highest mean cost that the intervals of the runs allow; None if one is unknown."""
    ends: list[Range] = []
    for run in runs:
        if run.may_differ_at is None:
            ends.append((_cost([run]), _cost([run])))
        elif run.intervals is None or (run.flushed is not None and run.intervals.flushed is None):
            return None
        else:
            rate, share = run.intervals.skip_rate, run.intervals.flushed or (1.0, 1.0)
            ends.append((_lost(rate[0], share[0]), _lost(rate[1], share[1])))
    weights = [len(run.scales) for run in runs]
    low, high = (sum(map(operator.mul, side, weights)) / sum(weights) for side in zip(*ends, strict=True))
    return low, high


def _lost(skipped: float, flushed: float) -> float:
    return skipped + (1 - skipped) * flushed
