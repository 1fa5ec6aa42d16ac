"""How long a loop stands still for a checkpoint that is written at the visit, by Halfstep's thread, or by TensorFlow's.

    python benchmarks/checkpoints.py [--json] [--quick]

A turn is a save and the steps after it, until the checkpoint is whole. A step adds to every variable in place, and so
is as short as a step can be. The clock stops at the end of the save, and at the end of the turn: what a save leaves to
the steps after it, such as a copy of each variable that the next step makes, counts in the second.
"""

from __future__ import annotations

import gc
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import paired
import tensorflow as tf

import loops

SIZES = {"10^6": 10**6, "10^7": 10**7, "10^8": 10**8}
TENSORS = 20
AT_VISIT, BESIDE, THEIRS, NONE = "at the visit", "background=True", "TensorFlow's async", "no save"
LEAST = 0.2
"""Of the time at the visit, for the largest size."""
ROUNDS, STEPS = 9, 10
WARM_UP = 2
"""Turns: TensorFlow's async traces its copy at the second one."""


class Run:
    """A loop over its own variables, and how it saves."""

    def __init__(self, kind: str, parameters: int, folder: pathlib.Path):
        self._variables = [tf.Variable(tf.random.normal([parameters // TENSORS])) for _ in range(TENSORS)]
        self.loop = loops.Loop(self._step, tf.data.Dataset.range(10**6), steps_per_call=STEPS)
        self._wait: Callable[[], object] = lambda: None
        self._save: Callable[[int], object] = lambda number: None
        if kind in (AT_VISIT, BESIDE):
            # Without other actions of the loop: it is called here as a loop would.
            action = loops.Checkpoint(folder, every=1, keep=2, background=kind == BESIDE)
            action.begin(self.loop)
            action.__enter__()
            self._save = lambda number: action(loops.Visit(self.loop.counters, {"loss": np.zeros(STEPS)}, 0.0, number))
            self._wait = action.wait
            self.close = lambda: action.__exit__(None, None, None)
        elif kind == THEIRS:
            checkpoint = tf.train.Checkpoint(variables=self._variables)
            manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
            options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
            self._save = lambda number: manager.save(checkpoint_number=number, options=options)
            self._wait = manager.sync
            self.close = manager.sync

    def _step(self, number: tf.Tensor) -> dict[str, tf.Tensor]:
        for variable in self._variables:
            variable.assign_add(tf.ones_like(variable))
        return {"loss": self._variables[0][0] + tf.cast(number, tf.float32)}

    def close(self) -> None:
        """Ends what it has begun."""

    def turn(self) -> tuple[float, float]:
        """Seconds of the save, and of all of it."""
        start = time.perf_counter()
        self._save(self.loop.counters.data)
        saved = time.perf_counter()
        self.loop.take(STEPS)
        self._wait()
        return saved - start, time.perf_counter() - start


def take_turns(parameters: int, rounds: int) -> tuple[paired.Seconds, paired.Seconds]:
    """Seconds of saves, and of turns, by kind; one of each in every round, in an order drawn anew."""
    saves: paired.Seconds = {kind: [] for kind in (AT_VISIT, BESIDE, THEIRS, NONE)}
    turns: paired.Seconds = {kind: [] for kind in saves}
    order, dice = list(saves), random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        runs = {kind: Run(kind, parameters, pathlib.Path(place) / str(n)) for n, kind in enumerate(order)}
        for run in runs.values():
            run.loop.take(STEPS)
            for _ in range(WARM_UP):
                run.turn()
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            dice.shuffle(order)
            for kind in order:
                saved, whole = runs[kind].turn()
                saves[kind].append(saved)
                turns[kind].append(whole)
        gc.enable()
        for run in runs.values():
            run.close()
    return saves, turns


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    for title, size in SIZES.items():
        saves, turns = take_turns(size // 1000 if quick else size, 2 if quick else ROUNDS)
        del saves[NONE]
        for kind in (BESIDE, THEIRS):
            target = LEAST if (title, kind) == ("10^8", BESIDE) else None
            name = f"{title} parameters: the loop stands still, {kind} to {AT_VISIT}"
            figures.append(paired.figure(name, saves, kind, AT_VISIT, target))
        bare = statistics.median(turns[NONE])
        for kind in (AT_VISIT, BESIDE, THEIRS):
            more = [seconds - bare for seconds in turns[kind]]
            low, median, high = statistics.quantiles(more, n=4, method="inclusive")
            name = f"{title} parameters: seconds that a save and {STEPS} steps take beyond the steps, {kind}"
            figures.append(paired.Figure(name, median, (low, high)))
        found[f"{title}, saves"] = paired.case(saves, AT_VISIT)
        found[f"{title}, turns"] = paired.case(turns, AT_VISIT)
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "checkpoints", run)
