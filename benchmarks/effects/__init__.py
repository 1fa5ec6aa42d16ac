"""Published effects of number formats in training, measured again: one module for each effect."""

from __future__ import annotations

import dataclasses
import importlib
import time

import scaler
from benchmarks.effects.effect import Effect as Effect
from benchmarks.effects.effect import Experiment as Experiment
from benchmarks.effects.effect import told, written
from loops.support.errors import check_count


def _experiment(name: str) -> Experiment:
    module, text = importlib.import_module(f"{__name__}.{name.replace('-', '_')}"), written(name)

    def run(seeds: int, steps: int) -> Effect:
        return told(name, seeds, steps, module.run(seeds, steps))

    return Experiment(name, text["summary"], text["steps"], run, text["seeds"])


EXPERIMENTS = tuple(map(_experiment, written("index")["effects"]))
"""The effects in the order of the index, `NAME.py` and `NAME.toml` each: published ones, and two of ours."""


def choose(name: str) -> Experiment:
    """An effect by name.

    Raises:
        scaler.InvalidArgument: For an unknown name.
    """
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise scaler.InvalidArgument(
        f"effect {name!r}: expected one of {', '.join(one.name for one in EXPERIMENTS)}; list shows what they measure."
    )


def measure(experiment: Experiment, seeds: int | None = None, steps: int | None = None) -> Effect:
    """Runs an experiment, and notes how long it took.

    Args:
        experiment: One of `EXPERIMENTS`.
        seeds: The number of seeds (default: the experiment's number).
        steps: The steps of each run (default: the experiment's number).

    Raises:
        scaler.InvalidArgument: For numbers that are not counts, and for fewer than 10 steps, in which nothing settles.
    """
    seeds = experiment.seeds if seeds is None else seeds
    check_count(f"effect {experiment.name}, seeds={seeds!r}", seeds)
    steps = experiment.steps if steps is None else steps
    check_count(f"effect {experiment.name}, steps={steps!r}", steps, 10)
    began = time.perf_counter()
    effect = experiment.run(seeds, steps)
    return dataclasses.replace(effect, seconds=round(time.perf_counter() - began, 1))
