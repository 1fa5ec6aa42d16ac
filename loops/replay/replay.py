"""Replays strategies over recorded steps."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import scaler
from loops.replay.recording import Recording, largest_gradient, recording_of
from loops.replay.results import Replay, Replayed
from loops.replay.sources import Source, named_strategies, tables_of
from loops.replay.stepping import Facts, step_through
from loops.replay.tallies import Counted, Lost, Tallies, counted_in, lost, tallies_of
from loops.support.errors import LoopError

Progress = Callable[[int, int], object]
_THREADS = 2
"""The number of strategies that are replayed in parallel."""


def replay(
    traces: Source | Sequence[Source],
    strategies: str | scaler.Strategy | Sequence[str | scaler.Strategy],
    *,
    progress: Progress | None = None,
) -> Replay:
    """The scale that each strategy would have had at each step of a run, and its skips.

    A step is skipped if the replayed scale is above the step's limit, which follows from the recorded critical scale
    and from the step's own decision. docs/replay.md says what counts if the trace is not certain.

    Args:
        traces: A trace, the folder of a run with a trace, or what `read` returned; or a list of these. Every strategy
            starts from its initial state in each trace.
        strategies: One or several, as text for `halfstep train --strategy`, or as objects.
        progress: Called with the number of finished strategies, and their total.

    Raises:
        LoopError: If a trace cannot be read, or lacks what a strategy needs: the message says how to record it.
        scaler.InvalidArgument: If an argument is not a trace or not a strategy.
    """
    named = named_strategies(strategies)
    recordings = [recording_of(tables, name) for name, tables in tables_of(traces)]
    return replay_recordings(recordings, named, progress)


def replay_recordings(
    recordings: Sequence[Recording],
    strategies: Sequence[tuple[str, scaler.Strategy]],
    progress: Progress | None = None,
) -> Replay:
    """`replay` for traces that are already read."""
    facts = _facts(recordings, strategies)
    counted = [counted_in(recording) for recording in recordings]

    def one(named: tuple[str, scaler.Strategy]) -> Replayed:
        return _replayed(*named, recordings, facts, counted)

    found: list[Replayed] = []
    # XLA's compiled code runs without the GIL.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for replayed in pool.map(one, strategies):
            found.append(replayed)
            if progress:
                progress(len(found), len(strategies))
    numbers = np.concatenate([recording.step for recording in recordings])
    return Replay(len(numbers), tuple(found), numbers)


def _replayed(
    name: str,
    strategy: scaler.Strategy,
    recordings: Sequence[Recording],
    facts: Sequence[Callable[[scaler.Strategy], Facts]],
    counted: Sequence[Counted],
) -> Replayed:
    runs = [step_through(strategy, known(strategy)) for known in facts]
    for run in runs:
        _check_moved(name, strategy, run.used)
    skipped = [run.used > one.limits.decided for run, one in zip(runs, recordings, strict=True)]
    losses = [
        lost(counts, one, run.used, skips)
        for counts, one, run, skips in zip(counted, recordings, runs, skipped, strict=True)
    ]
    unsure = sum(_unsure(run.used, one) for run, one in zip(runs, recordings, strict=True))
    used = np.concatenate([run.used for run in runs])
    return _summed(name, strategy, used, np.concatenate(skipped), unsure, runs[-1].final, losses)


def _facts(
    recordings: Sequence[Recording], strategies: Sequence[tuple[str, scaler.Strategy]]
) -> list[Callable[[scaler.Strategy], Facts]]:
    """For each recording a function from a strategy to the facts that it needs. Raises now if a trace lacks some."""
    return [functools.partial(_needed, recording, *_statistics(recording, strategies)) for recording in recordings]


def _statistics(
    recording: Recording, strategies: Sequence[tuple[str, scaler.Strategy]]
) -> tuple[np.ndarray | None, dict[tuple[float, ...], Tallies]]:
    amax: np.ndarray | None = None
    tallies: dict[tuple[float, ...], Tallies] = {}
    for name, strategy in strategies:
        needs = scaler.strategies.needs_of(strategy)
        try:
            if needs.amax and amax is None:
                amax = largest_gradient(recording)
            if needs.edges and needs.edges not in tallies:
                tallies[needs.edges] = tallies_of(recording, needs.edges)
        except LoopError as error:
            raise LoopError(f"strategy {name!r} cannot be replayed on {error}") from None
    return amax, tallies


def _needed(
    recording: Recording,
    amax: np.ndarray | None,
    tallies: Mapping[tuple[float, ...], Tallies],
    strategy: scaler.Strategy,
) -> Facts:
    needs = scaler.strategies.needs_of(strategy)
    return Facts(recording.limits.decided, amax if needs.amax else None, tallies.get(needs.edges))


def _check_moved(name: str, strategy: scaler.Strategy, scales: np.ndarray) -> None:
    if scaler.strategies.needs_of(strategy).edges and (np.frexp(scales)[0] != 0.5).any():
        odd = scales[np.frexp(scales)[0] != 0.5][0]
        raise scaler.InvalidArgument(
            f"strategy {name!r}: its scale becomes {odd:g}, but the recorded histograms, which it needs, can only be "
            "moved by powers of two. Give it an initial_scale, a floor and a ceiling that are powers of two."
        )


def _unsure(scales: np.ndarray, recording: Recording) -> int:
    limits = recording.limits
    return int(((scales > limits.finite_to) & (scales <= limits.skips_from)).sum())


def _summed(
    name: str,
    strategy: scaler.Strategy,
    scales: np.ndarray,
    skipped: np.ndarray,
    unsure: int,
    final: float,
    losses: Sequence[Lost],
) -> Replayed:
    low, high = (float(bound) for bound in scaler.strategies.float_bounds_of(strategy))
    skips, values = int(skipped.sum()), sum(one.values for one in losses)
    return Replayed(
        strategy=name,
        skips=skips,
        skip_rate=skips / len(scales),
        mean_log2_scale=float(np.log2(scales.astype(np.float64)).mean()),
        final_scale=final,
        flushed=sum(one.flushed for one in losses) / values if values else None,
        at_floor=float((scales == low).mean()) if low < high else None,
        at_ceiling=float((scales == high).mean()) if low < high else None,
        uncertain=unsure,
        scales=scales,
        skipped=skipped,
    )
