"""The one place that measures time: contenders take turns, and what counts is their ratios within a round.

A machine is slower in one minute than in the next, for everybody. So every contender is called once a round, in an
order drawn again, after a warm-up in which functions are traced and compiled. A figure is the median over the rounds of
one contender's time divided by another's, with the quartiles; minima and medians in ms stand beside it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import gc
import json
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import rich.box
import rich.console
import rich.table
import tensorflow as tf

# A benchmark makes the same function for one size after another, which TensorFlow warns of.
tf.get_logger().setLevel("ERROR")

Seconds = dict[str, list[float]]
_WARM_UP = 2
"""Calls after the one that compiles."""
_FEWEST = 7
"""Rounds that are taken whatever they last: the quartiles of fewer say nothing."""


class Figure(NamedTuple):
    """A number that answers a question, beside what it should be.

    Attributes:
        name: What was measured.
        value: The median, or a plain number where nothing takes turns.
        quartiles: Over the rounds, or None.
        target: The largest value that is good enough (the least, with `at_least`), or None.
        at_least: Whether more is better.
    """

    name: str
    value: float
    quartiles: tuple[float, float] | None = None
    target: float | None = None
    at_least: bool = False

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached, None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


class Report(NamedTuple):
    """What a benchmark found: its figures, and every contender's times by the case they belong to."""

    figures: list[Figure]
    cases: dict[str, dict]


def take_turns(
    contenders: Mapping[str, Callable[[], object]], seconds: float, quick: bool = False, threads: int | None = None
) -> Seconds:
    """Seconds of each call, by contender; the calls with the same index were made in the same round.

    Args:
        contenders: Functions whose result, a tensor, is read on the host: it is then that a GPU has done its work.
        seconds: For how long to measure, warm-up aside.
        quick: Two rounds, to see that it runs.
        threads: How many of them are traced at once. Default: one for each core.
    """
    # XLA compiles one function on one core, for minutes if it has hundreds of variables.
    with concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        list(pool.map(lambda step: _finish(step()), contenders.values()))
    for _ in range(0 if quick else _WARM_UP):
        for step in contenders.values():
            _finish(step())
    taken: Seconds = {name: [] for name in contenders}
    order, dice = list(contenders), random.Random(0)
    with _no_garbage_collection():
        start = time.perf_counter()
        while (rounds := len(taken[order[0]])) < (2 if quick else _FEWEST) or (
            not quick and time.perf_counter() - start < seconds and rounds < 1000
        ):
            dice.shuffle(order)
            for name in order:
                before = time.perf_counter()
                _finish(contenders[name]())
                taken[name].append(time.perf_counter() - before)
    return taken


def ratio(taken: Seconds, name: str, reference: str) -> tuple[float, tuple[float, float]]:
    """The median over the rounds of one contender's time by another's, and the quartiles."""
    ratios = [own / other for own, other in zip(taken[name], taken[reference], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, (low, high)


def best(taken: Seconds, names: Iterable[str]) -> str:
    """The contender with the least median time."""
    return min((name for name in names if name in taken), key=lambda name: statistics.median(taken[name]))


def figure(name: str, taken: Seconds, contender: str, reference: str, target: float | None = None) -> Figure:
    """The ratio of two contenders as a figure."""
    return Figure(name, *ratio(taken, contender, reference), target)


def case(taken: Seconds, reference: str, **more) -> dict:
    """All contenders of a case for a program to read: times in ms, ratios to the reference."""
    contenders = {}
    for name, times in taken.items():
        median, quartiles = ratio(taken, name, reference)
        contenders[name] = {
            "minimum_ms": min(times) * 1e3,
            "median_ms": statistics.median(times) * 1e3,
            "ratio": median,
            "quartiles": quartiles,
        }
    return {"reference": reference, "rounds": len(taken[reference]), "contenders": contenders, **more}


def machine() -> dict:
    """What the figures were measured on."""
    return {
        "cpu": _cpu(),
        "16 bits": ", ".join(_flags()) or "no arithmetic of its own",
        "oneDNN": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "as installed"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [
            tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
            for gpu in tf.config.list_physical_devices("GPU")
        ],
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def _flags() -> list[str]:
    """The processor's arithmetic in 16 bits."""
    path = pathlib.Path("/proc/cpuinfo")
    known = path.read_text(errors="replace").split() if path.exists() else []
    return [flag for flag in ("avx512_fp16", "avx512_bf16", "amx_bf16", "amx_fp16") if flag in known]


def main(doc: str, name: str, run: Callable[[bool], Report]) -> Report:
    """The command line that all benchmarks share: a table for people, `--json` for programs.

    Args:
        doc: The benchmark's docstring, whose first line is its help.
        name: The benchmark's name.
        run: Measures; its argument is whether to be quick, with tiny sizes and figures that mean nothing.

    Returns:
        What `run` found.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two rounds, to see that it runs")
    options = parser.parse_args()
    start = time.perf_counter()
    where = machine()
    report = run(options.quick)
    seconds = time.perf_counter() - start
    if options.json:
        figures = [{**entry._asdict(), "reached": entry.reached} for entry in report.figures]
        found = {"benchmark": name, "machine": where, "quick": options.quick, "seconds": seconds}
        print(json.dumps({**found, "figures": figures, "cases": report.cases}, indent=2))
        return report
    console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
    console.print(" · ".join(f"{key} {value}" for key, value in where.items()))
    for title, found in report.cases.items():
        console.print(_contenders(title, found))
    console.print(table(report.figures))
    return report


def table(figures: Sequence[Figure]) -> rich.table.Table:
    """Figures beside their targets."""
    rows = rich.table.Table("figure", "median", "quartiles", "target", "", box=rich.box.SIMPLE)
    for entry in figures:
        quartiles = "" if entry.quartiles is None else " to ".join(f"{value:.3f}" for value in entry.quartiles)
        target = "" if entry.target is None else f"{'≥' if entry.at_least else '≤'} {entry.target:g}"
        verdict = {None: "", True: "[green]reached[/]", False: "[red]missed[/]"}[entry.reached]
        rows.add_row(entry.name, f"{entry.value:.3f}", quartiles, target, verdict)
    return rows


def _contenders(title: str, found: dict) -> rich.table.Table:
    if "contenders" not in found:
        rows = rich.table.Table("", "", title=title, title_justify="left", box=rich.box.SIMPLE)
        for key, value in found.items():
            rows.add_row(key, f"{value:.3g}" if isinstance(value, float) else str(value))
        return rows
    columns = ("contender", "least ms", "median ms", "ratio", "quartiles")
    title = f"{title} ({found['rounds']} rounds; ratios to {found['reference']})"
    rows = rich.table.Table(*columns, title=title, title_justify="left", box=rich.box.SIMPLE)
    for name, seen in found["contenders"].items():
        low, high = seen["quartiles"]
        times = (f"{seen['minimum_ms']:.2f}", f"{seen['median_ms']:.2f}")
        rows.add_row(name, *times, f"{seen['ratio']:.3f}", f"{low:.3f} to {high:.3f}")
    return rows


def _finish(result: object) -> None:
    if isinstance(result, tf.Tensor):
        result.numpy()


@contextlib.contextmanager
def _no_garbage_collection():
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _cpu() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
