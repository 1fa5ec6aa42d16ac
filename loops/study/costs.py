"""The costs of a study's runs: time, memory, and the energy that the machine reports.

RAPL counts the energy of processors, in Linux, and NVML that of NVIDIA's GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.memory import footprints
from loops.loop.loop import Loop
from loops.loop.visit import Visit
from loops.step.train_step import TrainStep
from loops.tasks import ImageTask

_POWERCAP = pathlib.Path("/sys/class/powercap")


class EnergyMeter:
    """Sums joules since its creation: of processors by RAPL, and of NVIDIA's GPUs by NVML.

    The counters cover the whole machine, including other programs. RAPL's wrap around every few minutes to hours, so
    read the meter more often than that.

    Args:
        powercap: The folder of RAPL's counters in Linux, with a subfolder for each processor. Users other than root
            can read them only if the administrator allows it.
    """

    def __init__(self, powercap: pathlib.Path = _POWERCAP):
        self._sources: Sequence[Any] = [*_processors(powercap), *_gpus()]

    @property
    def sources(self) -> list[str]:
        """The names of the sources; empty if the machine reports no energy."""
        return [one.name for one in self._sources]

    def joules(self) -> float | None:
        """Joules since the meter was created; None if the machine does not report them, or no longer does."""
        try:
            return sum(one.joules() for one in self._sources) if self._sources else None
        except (OSError, ValueError):
            return None


def _processors(powercap: pathlib.Path) -> list[_Rapl]:
    """The counters that can be read, one for each processor package: intel-rapl:0:1 is a part of intel-rapl:0."""
    places = sorted(place for place in powercap.glob("intel-rapl:*") if place.name.count(":") == 1)
    return [found for place in places if (found := _Rapl.readable(place))]


class _Rapl:
    """A counter of microjoules that wraps around to 0."""

    def __init__(self, place: pathlib.Path):
        self.name = f"RAPL {(place / 'name').read_text(encoding='ascii').strip()}"
        self._counter = place / "energy_uj"
        self._range = int((place / "max_energy_range_uj").read_text(encoding="ascii")) + 1
        self._last, self._sum = self._now(), 0

    @classmethod
    def readable(cls, place: pathlib.Path) -> _Rapl | None:
        """The counter in a folder; None if it cannot be read."""
        try:
            return cls(place)
        except (OSError, ValueError):
            return None

    def joules(self) -> float:
        """Joules since the object was created."""
        now = self._now()
        self._sum += (now - self._last) % self._range
        self._last = now
        return self._sum / 1e6

    def _now(self) -> int:
        return int(self._counter.read_text(encoding="ascii"))


class _Nvml:
    """NVML's counter of millijoules since the driver was loaded."""

    def __init__(self, nvml: Any, handle: Any, number: int):
        self.name = f"NVML GPU {number}"
        self._read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        self._failed, self._start = nvml.NVMLError, 0
        self._start = self._read()

    def joules(self) -> float:
        """Joules since the object was created."""
        try:
            return (self._read() - self._start) / 1e3
        except self._failed as error:
            raise ValueError(f"{self.name} no longer answers") from error


def _gpus() -> list[_Nvml]:
    """The counters of this machine's GPUs; empty without a GPU, a driver or the extra `study`."""
    try:
        import pynvml
    except ImportError:
        return []
    found: list[_Nvml] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            found.append(_Nvml(pynvml, pynvml.nvmlDeviceGetHandleByIndex(number), number))
    return found


COSTS = ("ms/step", "MB", "J/step")
"""Headings of `cost_cells`."""


class Costs:
    """An action that measures a run, from visit to visit. It leaves out the first call, which traces the step.

    Put it before the actions that take time, and its `leave` after them, so their time does not count as the step's.

    Args:
        meter: The meter of the machine's energy.
    """

    def __init__(self, meter: EnergyMeter):
        self._meter = meter
        self._left: tuple[float, float | None] | None = None
        self._milliseconds: list[float] = []
        self._joules: list[float] = []
        self._step: TrainStep | None = None

    def begin(self, loop: Loop) -> None:
        """Keeps the train step."""
        if isinstance(loop.train_step, TrainStep):
            self._step = loop.train_step

    def __call__(self, visit: Visit) -> None:
        """Measures the steps of the call that has just ended."""
        if self._left is None:
            return
        steps, (start, before) = len(visit.outputs["loss"]), self._left
        self._milliseconds.append(1000 * (time.perf_counter() - start) / steps)
        joules = self._meter.joules()
        if joules is not None and before is not None:
            self._joules.append((joules - before) / steps)

    def leave(self, visit: Visit) -> None:
        """Notes the time and energy at which the next call begins."""
        self._left = time.perf_counter(), self._meter.joules()

    def as_dict(self, task: ImageTask, batch_size: int, known: dict) -> dict:
        """`milliseconds` a step and `joules` a step, a number for each call but the first, and `bytes`.

        Args:
            task: The run's task.
            batch_size: The run's batch size.
            known: A cache of bytes, shared by the runs of a study and filled here.
        """
        return {
            "milliseconds": self._milliseconds,
            "joules": self._joules,
            "bytes": self._bytes(task, batch_size, known),
        }

    def _bytes(self, task: ImageTask, batch_size: int, known: dict) -> dict | None:
        if self._step is None:
            return None
        model, masters = self._step.model, not self._step.allow_16bit_updates
        key = tuple(variable.dtype for variable in model.variables), masters, batch_size
        if key not in known:
            batch = tf.constant(task.images[:batch_size]), tf.constant(task.labels[:batch_size])
            try:
                (found,) = footprints(
                    model, task.loss, batch, self._step.optimizer, policies=(), masters=masters, checkpointing=False
                )
                known[key] = {**dataclasses.asdict(found.all), "total": found.all.total}
            except (scaler.ScalerError, ValueError, TypeError, tf.errors.OpError):
                known[key] = None
        return known[key]


def costs_of(runs: Sequence[Mapping]) -> dict:
    """The costs of a set-up over its runs; None for unknown ones.

    Returns:
        `milliseconds` a step, the median over the calls of all runs, with the quartiles `milliseconds_low` and
        `milliseconds_high`; `joules` a step, the median; `bytes`, the memory of a step.
    """
    costs = [run["costs"] for run in runs if "costs" in run]
    times = [value for cost in costs for value in cost["milliseconds"]]
    joules = [value for cost in costs for value in cost["joules"]]
    low, median, high = np.percentile(times, [25, 50, 75]).tolist() if times else (None, None, None)
    return {
        "milliseconds": median,
        "milliseconds_low": low,
        "milliseconds_high": high,
        "joules": statistics.median(joules) if joules else None,
        "bytes": next((cost["bytes"]["total"] for cost in costs if cost["bytes"]), None),
    }


def cost_cells(row: Mapping) -> tuple[str, str, str]:
    """Time, memory and energy of a row of `summary["setups"]`, a dash if unknown."""
    milliseconds, joules, size = row.get("milliseconds"), row.get("joules"), row.get("bytes")
    return (
        "–" if milliseconds is None else f"{milliseconds:.3g}",
        "–" if size is None else f"{size / 1e6:.3g}",
        "–" if joules is None else f"{joules:.2g}",
    )


def has_costs(summary: Mapping) -> bool:
    """Whether any set-up has known costs."""
    return any(cell != "–" for row in summary["setups"] for cell in cost_cells(row))
