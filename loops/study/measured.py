"""What a study measures of its runs: costs, and where the gradients lie on float16's number line.

Costs are time, memory, and the energy that the machine reports. RAPL counts that of processors, in Linux, and NVML that
of NVIDIA's GPUs. Gradients are seen through a float32 twin of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
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
        self._sources: list[_Rapl | _Nvml] = []
        for place in sorted(powercap.glob("intel-rapl:*")):
            with contextlib.suppress(OSError, ValueError):  # Of one that cannot be read.
                if place.name.count(":") == 1:  # A processor package: intel-rapl:0:1 is a part of intel-rapl:0.
                    self._sources.append(_Rapl(place))
        self._sources += _gpus()

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


class _Rapl:
    """A counter of microjoules that wraps around to 0."""

    def __init__(self, place: pathlib.Path):
        self.name = f"RAPL {(place / 'name').read_text(encoding='ascii').strip()}"
        self._counter = place / "energy_uj"
        self._range = int((place / "max_energy_range_uj").read_text(encoding="ascii")) + 1
        self._last, self._sum = self._now(), 0

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

    Attributes:
        visited: The step of the run at its last visit.
    """

    def __init__(self, meter: EnergyMeter):
        self._meter = meter
        self._left: tuple[float, float | None] | None = None
        self._milliseconds: list[float] = []
        self._joules: list[float] = []
        self._step: TrainStep | None = None
        self.visited = 0

    def begin(self, loop: Loop) -> None:
        """Keeps the train step."""
        if isinstance(loop.train_step, TrainStep):
            self._step = loop.train_step

    def __call__(self, visit: Visit) -> None:
        """Measures the steps of the call that has just ended."""
        self.visited = visit.counters.data
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


LOWEST, HIGHEST = -60, 20
"""The exponents with bins, as floor(log2|g|); values beyond are in the end bins."""


Counts = dict[str, dict[str, np.ndarray]]
"""For "weights" and "activations" each: counts of gradient values, also summed over the visits of a run.

`histogram` has the values by floor(log2|g|) of the *unscaled* float32 gradient, `scaled_histogram` the same for the
gradient times the loss scale in use at that visit, both without zeros: int64 [HIGHEST - LOWEST + 1]. `zero` counts the
values that are zero in float32, `nonzero` all others; `flushed` and `overflowed` count those of them that float16 makes
zero or infinite at the loss scale in use.
"""


def no_counts() -> Counts:
    """The counts of a run before its first visit."""
    wide = {name: np.zeros(HIGHEST - LOWEST + 1, np.int64) for name in ("histogram", "scaled_histogram")}
    single = {name: np.int64(0) for name in ("zero", "nonzero", "flushed", "overflowed")}
    return {kind: {**wide, **single} for kind in ("weights", "activations")}


def counts_as_dict(counts: Counts) -> dict:
    """Counts as JSON values."""
    return {
        kind: {
            **{name: value.tolist() for name, value in own.items()},
            "lowest_exponent": LOWEST,
            "flushed_share": float(own["flushed"] / own["nonzero"]) if own["nonzero"] else None,
        }
        for kind, own in counts.items()
    }


class GradientProbe:
    """Counts the gradients of a fixed batch, by weights and by activations, in a float32 twin of the model.

    A float16 run cannot show what it loses; a twin with the same weights can. One probe serves a whole study, so its
    graph is traced once: `counting` gives an action for a run.
    """

    def __init__(self, task: ImageTask, examples: int = 64, *, unit_scaled: bool = False):
        twin = task.model("float32")
        self._twin = scaler.formats.unit_scaled(twin) if unit_scaled else twin
        self._loss = scaler.formats.unit_cross_entropy if unit_scaled else task.loss
        self._images = tf.constant(task.images[:examples])
        self._labels = tf.constant(task.labels[:examples])
        self._format = scaler.float_format("float16")
        self._count = tf.function(self._count_all)

    def counting(self, model: keras.Model, loss_factor: float) -> GradientAction:
        """An action that counts the gradients of `model` at each visit."""
        return GradientAction(self, model, loss_factor)

    def count(self, model: keras.Model, loss_factor: float, loss_scale: float) -> Counts:
        """Counts at the model's current weights."""
        for twin_layer, layer in zip(self._twin.layers, model.layers, strict=True):
            # An emulated layer has its scales behind the variables of its own.
            for twin, variable in zip(twin_layer.variables, layer.variables, strict=False):
                twin.assign(keras.ops.cast(variable, twin.dtype))
        counted = self._count(tf.constant(loss_factor, tf.float32), tf.constant(loss_scale, tf.float32))
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), counted)

    def _count_all(self, loss_factor: tf.Tensor, loss_scale: tf.Tensor) -> dict[str, dict[str, tf.Tensor]]:
        weights = self._twin.trainable_variables
        with tf.GradientTape() as tape:
            hidden, activations = self._images, []
            for layer in self._twin.layers:
                hidden = layer(hidden, training=True)
                activations.append(hidden)
            loss = self._loss(self._labels, hidden) * loss_factor
        by_weight, by_activation = tape.gradient(loss, (weights, activations))
        return {
            "weights": self._count_list(by_weight, loss_scale),
            "activations": self._count_list(by_activation, loss_scale),
        }

    def _count_list(self, grads: list, loss_scale: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.concat([tf.reshape(grad, [-1]) for grad in grads], axis=0)
        scaled = values * loss_scale
        return {
            "histogram": _histogram(values),
            "scaled_histogram": _histogram(scaled),
            "zero": tf.math.count_nonzero(tf.equal(values, 0.0)),
            "nonzero": tf.math.count_nonzero(values),
            "flushed": tf.math.count_nonzero(self._format.underflows(scaled)),
            "overflowed": tf.math.count_nonzero(self._format.overflows(scaled)),
        }


class GradientAction:
    """The counts of one run, filled at each visit whose weights are finite."""

    def __init__(self, probe: GradientProbe, model: keras.Model, loss_factor: float):
        self._probe, self._model, self._factor = probe, model, loss_factor
        self.counts = no_counts()

    def __call__(self, visit: Visit) -> None:
        """Counts the gradients at the loss scale of the last step."""
        if not all(np.isfinite(np.asarray(v, np.float32)).all() for v in self._model.trainable_variables):
            return
        counted = self._probe.count(self._model, self._factor, float(visit.outputs["loss_scale"][-1]))
        for kind, counts in self.counts.items():
            self.counts[kind] = {name: value + counted[kind][name] for name, value in counts.items()}


def _histogram(values: tf.Tensor) -> tf.Tensor:
    nonzero = tf.boolean_mask(values, tf.not_equal(values, 0.0))
    bits = tf.bitwise.bitwise_and(tf.bitcast(nonzero, tf.int32), 0x7FFFFFFF)
    exponents = tf.bitwise.right_shift(bits, 23) - 127
    return tf.math.bincount(tf.clip_by_value(exponents, LOWEST, HIGHEST) - LOWEST, minlength=HIGHEST - LOWEST + 1)
