"""Replays strategies over recorded steps."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import scaler
from loops.replay.differences import PathLike, differences_in
from loops.replay.one_run import one_run
from loops.replay.recording import Recording, largest_gradient, recording_of
from loops.replay.results import Replay, Replayed
from loops.replay.several_runs import lacking, summed, with_intervals
from loops.replay.sources import Source, named_strategies, tables_of
from loops.replay.stepping import Facts, Scales, stepper
from loops.replay.tails import Tail
from loops.replay.tallies import Counted, Lost, Tallies, counted_in, lost, tallies_of
from loops.support.errors import LoopError

Progress = Callable[[int, int], object]
_THREADS = 2
"""The number of strategies that are replayed in parallel."""


def replay(
    traces: Source | Sequence[Source],
    strategies: str | scaler.Strategy | Sequence[str | scaler.Strategy],
    *,
    validated: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
) -> Replay:
    """The scale and the skips of each strategy at each step of a run: up to its first that may differ.

    After that it is an estimate: training would have other gradients. A step is skipped if the replayed scale is above
    the step's limit, which follows from the recorded critical scale and from the step's own decision. docs/replay.md
    says what counts if the trace is not certain.

    Args:
        traces: A trace, the folder of a run with a trace, or what `read` returned; or a list of these. Every strategy
            starts from its initial state in each trace. Traces of six and more seeds give intervals.
        strategies: One or several, as text for `halfstep train --strategy`, or as objects.
        validated: Files of what `halfstep replay --validate --json` printed of this problem, for the intervals.
        progress: Called with the number of finished strategies, and their total.

    Raises:
        LoopError: If a file cannot be read, or a trace lacks what a strategy needs: the message says how to record it.
        scaler.InvalidArgument: If an argument is not a trace or not a strategy.
    """
    named = named_strategies(strategies)
    recordings = [recording_of(tables, name) for name, tables in tables_of(traces)]
    return replay_recordings(recordings, named, progress, differences_in(validated))


def replay_recordings(
    recordings: Sequence[Recording],
    strategies: Sequence[tuple[str, scaler.Strategy]],
    progress: Progress | None = None,
    differences: Sequence[Tail] = (),
) -> Replay:
    """`replay` for traces that are already read, with the differences of runs that are already validated."""
    facts = _facts(recordings, strategies)
    counted = [counted_in(recording) for recording in recordings]

    def one(named: tuple[str, scaler.Strategy]) -> Replayed:
        return _replayed(*named, recordings, facts, counted, differences)

    found: list[Replayed] = []
    # XLA's compiled code runs without the GIL.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for replayed in pool.map(one, strategies):
            found.append(replayed)
            if progress:
                progress(len(found), len(strategies))
    numbers = np.concatenate([recording.step for recording in recordings])
    return Replay(len(numbers), tuple(found), lacking(found, recordings, differences), numbers)


def _replayed(
    name: str,
    strategy: scaler.Strategy,
    recordings: Sequence[Recording],
    facts: Sequence[Callable[[scaler.Strategy], Facts]],
    counted: Sequence[Counted],
    differences: Sequence[Tail],
) -> Replayed:
    runs, step_through = [], stepper(strategy)
    for recording, known, counts in zip(recordings, facts, counted, strict=True):
        run = step_through(known(strategy))
        _check_moved(name, strategy, run.used)
        lost_of = functools.partial(_lost, counts, recording, run.used)
        overflowing = functools.partial(_overflowing, step_through, known(strategy))
        runs.append(one_run(name, strategy, recording, run, lost_of, overflowing))
    return summed(with_intervals(runs, differences), [run.values for run in runs])


def _overflowing(step_through: Callable[[Facts], Scales], facts: Facts) -> np.ndarray:
    none = facts._replace(limit=np.zeros_like(facts.limit), of_loss=np.zeros_like(facts.of_loss))
    return step_through(none).used


def _lost(counts: Counted, recording: Recording, used: np.ndarray, skipped: np.ndarray, since: int) -> Lost:
    return lost(counts, recording, used, skipped, since)


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
    return Facts(recording.limits.decided, recording.of_loss, amax if needs.amax else None, tallies.get(needs.edges))


def _check_moved(name: str, strategy: scaler.Strategy, scales: np.ndarray) -> None:
    if scaler.strategies.needs_of(strategy).edges and (np.frexp(scales)[0] != 0.5).any():
        odd = scales[np.frexp(scales)[0] != 0.5][0]
        raise scaler.InvalidArgument(
            f"strategy {name!r}: its scale becomes {odd:g}, but the recorded histograms, which it needs, can only be "
            "moved by powers of two. Give it an initial_scale, a floor and a ceiling that are powers of two."
        )
