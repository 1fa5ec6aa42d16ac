"""How long a loop stands still for a checkpoint that is written at the visit, by Halfstep's thread, or by TensorFlow's.

    python benchmarks/checkpoints.py [--json] [--quick]

A turn is a save and the steps after it, until the checkpoint is whole. A step adds to every variable in place, and so
is as short as a step can be. The clock stops at the end of the save, and at the end of the turn. The time lost is that
of the turn beyond what its steps take without a save. So it has what a save leaves to the steps after it: copies of the
variables that the next step makes, or a core that writes.
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
ROUNDS, STEPS = 7, 2
WARM_UP = 2
"""Turns: TensorFlow's async traces its copy at the second one."""
LEAST_STEPS = 10
"""In a turn."""


class Run:
    """A loop over its own variables, and how it saves."""

    def __init__(self, kind: str, parameters: int, folder: pathlib.Path):
        self._variables = [tf.Variable(tf.random.normal([parameters // TENSORS])) for _ in range(TENSORS)]
        self.loop = loops.Loop(self._step, tf.data.Dataset.range(10**6), steps_per_call=STEPS)
        self._kind, self._folder = kind, folder
        self._save: Callable[[int], object] = lambda number: None
        self._wait: Callable[[], object] = lambda: None
        self.close: Callable[[], object] = lambda: None
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

    def turn(self) -> tuple[float, float, int]:
        """Seconds of the save, and of all of it; and how many steps it had."""
        start, number, steps = time.perf_counter(), self.loop.counters.data, 0
        self._save(number)
        saved = time.perf_counter()
        while steps < LEAST_STEPS or not self._whole(number):
            self.loop.take(STEPS)
            steps += STEPS
        end = time.perf_counter()
        self._wait()
        return saved - start, end - start, steps

    def _whole(self, number: int) -> bool:
        return self._kind == NONE or (self._folder / f"ckpt-{number}.index").exists()


def take_turns(parameters: int, rounds: int) -> tuple[paired.Seconds, paired.Seconds]:
    """Seconds of saves, and seconds lost, by kind; one of each in every round, in a new random order."""
    turns: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in (AT_VISIT, BESIDE, THEIRS, NONE)}
    order, dice = list(turns), random.Random(0)
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
                turns[kind].append(runs[kind].turn())
        gc.enable()
        for run in runs.values():
            run.close()
    step = statistics.median(whole / steps for _, whole, steps in turns.pop(NONE))
    saves = {kind: [saved for saved, _, _ in found] for kind, found in turns.items()}
    lost = {kind: [whole - steps * step for _, whole, steps in found] for kind, found in turns.items()}
    return saves, lost


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    for title, size in SIZES.items():
        saves, lost = take_turns(size // 1000 if quick else size, 2 if quick else ROUNDS)
        for kind in (BESIDE, THEIRS):
            target = LEAST if (title, kind) == ("10^8", BESIDE) else None
            name = f"{title} parameters: the loop stands still, {kind} to {AT_VISIT}"
            figures.append(paired.figure(name, saves, kind, AT_VISIT, target))
        for kind, seconds in lost.items():
            low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
            figures.append(paired.Figure(f"{title} parameters: seconds lost to a save, {kind}", median, (low, high)))
        found[title] = paired.case(saves, AT_VISIT)
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "checkpoints", run)
