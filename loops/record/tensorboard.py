"""Writes event files for TensorBoard: its curves and what each means, texts of skips, and histograms of exponents."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import struct
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from loops.loop.visit import Cadence, Seconds, Visit
from loops.record.steps import octaves_to_critical
from loops.record.trace.tensors import Tensor, tensors_of_watch
from loops.record.trace.visit_columns import (
    Averages,
    critical_scales,
    gauge_values,
    gauges_of,
    headroom_of,
    measured,
    noise_pairs,
    skip_names,
)
from loops.step.parts import OwnStep
from loops.step.probing import Watched, watched_by
from loops.support.part_names import columns_of
from loops.support.written import Place, as_path, check_folder
from scaler import observe

if TYPE_CHECKING:
    from loops.loop.loop import Loop


_TAGS = {
    "loss": "loss",
    "grad_norm": "gradient/global_norm",
    "clipped_norm": "gradient/clipped_norm",
    "norm_limit": "gradient/norm_limit",
    "applied": "step/applied",
}
_AS_TEXT = ("cause", "variable")
_NOT_SHOWN = ("loss_scale", "attempted")
_DESCRIPTIONS = {
    "loss": "The loss of the batch, unscaled.",
    "gradient/global_norm": "The global norm of the gradients, unscaled and before clipping.",
    "gradient/clipped_norm": "The global norm of what the optimizer was given; NaN at a skipped step.",
    "gradient/norm_limit": "The largest norm that a SpikeGuard allowed the step.",
    "loss_limit": "The largest loss that a SpikeGuard allowed the step.",
    "clipped_tensors": "How many gradients a SpikeGuard clipped to limits of their own.",
    "step/applied": "1 where the step moved the weights, 0 where it was skipped.",
    "scaler/log2_scale": "Log2 of the loss scale: one unit doubles the scale.",
    "scaler/skipped": "Skipped steps since the run began.",
    "scaler/headroom": "Octaves from the loss scale up to the critical scale, at which a measured gradient overflows.",
    "activations/headroom": "Octaves from the largest activation or weight up to the largest number of its format.",
    "optimizer/learning_rate": "The learning rate of the next step.",
    "time/steps_per_second": "Steps a second since the last point.",
    "retries": "How often the step took its gradients again, at a lower scale.",
}
_OF_GAUGES = {
    "attention_logit": "The largest magnitude of the layer's attention logits, after the scale and before the softmax.",
    "attention_entropy": "The mean entropy of the layer's attention, in nats: 0 where each query sees one key alone.",
    "update_rms": "The root mean square of what the step added to the layer's weights.",
    "update_ratio": "The same over the root mean square of the weights before the step.",
    "noise_scale": "The simple gradient noise scale, in examples, from averages over about a hundred steps.",
}


def _marked(plugin: str, said: str = "") -> tf.compat.v1.SummaryMetadata:
    """Marks a value for a plugin of TensorBoard, with what it shows."""
    data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin)
    return tf.compat.v1.SummaryMetadata(plugin_data=data, summary_description=said)


SKIPS = "scaler/skips"
"""The name of the texts: one for each skipped step."""
TEXT = _marked("text", "Why each skipped step was skipped, and the variable whose gradient was to blame.")
_WHOLE = "noise_scale"
"""The curve of a step that has no parts."""
METADATA = _marked("histograms")
"""Marks an array [bins, 3] as a histogram for TensorBoard: its columns are left edge, right edge and count."""


class TensorBoard:
    """Writes event files that TensorBoard shows as curves over the number of batches taken.

    The curves: `loss`, unscaled; `scaler/log2_scale`; `scaler/skipped`, skipped steps so far; `gradient/global_norm`,
    unscaled and before clipping, `gradient/clipped_norm`, after it, and `gradient/norm_limit`, of a
    `scaler.SpikeGuard`; `optimizer/learning_rate`;
    `time/steps_per_second` since the curve's previous point; other outputs of the train step by their names; and each
    result of the loop's `Evaluate` actions, such as `validation/accuracy`. Missing outputs have no curve. Each has a
    description, which TensorBoard shows beside its name.

    Each skipped step of a `TrainStep` has a text under `scaler/skips`, such as "OVERFLOW: dense/kernel", whatever
    `every` is.

    If the train step has probes, there are two more curves, in octaves: `scaler/headroom`, from the loss scale to
    the critical scale, and `activations/headroom`, from the largest activation or weight to the largest number of its
    format. There is also a histogram of each tensor, such as `exponents/activations/dense`, over the exponents of its
    values, without zeros, infinities and NaN: that of the last step of a visit that is due and was counted.
    Ready probes have a curve of each layer, such as `update_rms/dense`, and one `noise_scale`, see
    `loops.observe.noise_scale`, at steps that are due and were measured. Those of the parts of a `ComposedStep` are
    named after them: `critic/scaler/headroom`, `exponents/activations/critic/dense`, `update_rms/critic/dense`.

    Writing needs only TensorFlow; viewing needs the extra `tensorboard`, and a warning says if it is missing. Files are
    flushed at each visit that writes. A run that resumes from a checkpoint removes the points of later steps.

    Args:
        directory: A separate folder for this run. It is made if missing.
        every: Write points at the steps that are multiples of this number; with `Seconds`, at the last step of each
            visit that is due. The learning rate, skipped steps and speed are known only at a visit: they have a point
            at each visit that contains such a step.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    chief_only = True

    def __init__(self, directory: str | os.PathLike, *, every: int | Seconds = 10):
        self._directory = as_path("TensorBoard", "directory", directory)
        self.writes = Place(self._directory, "folder")
        self._cadence = Cadence("TensorBoard", every)
        self._writer: Any = None
        self._optimizer: Any = None
        self._train_step: Any = None
        self._evaluations: list[Any] = []
        self._shown: dict[int, int] = {}
        self._step = 0
        self._gauges = GaugeCurves()
        self._before: tuple[int, float] | None = None

    def begin(self, loop: Loop) -> None:
        """Before the first step: finds the optimizer, and the actions with results, such as an `Evaluate`.

        Raises:
            NotWritable: If the folder cannot be written.
        """
        check_folder("TensorBoard", self._directory)
        self._train_step = loop.train_step
        self._optimizer = getattr(loop.train_step, "optimizer", None)
        needed = ("name", "step", "results")
        self._evaluations = [action for action in loop.actions if all(hasattr(action, name) for name in needed)]
        if importlib.util.find_spec("tensorboard") is None:
            warnings.warn(
                f"TensorBoard is not installed here; {self._directory} is written anyway. To view it: "
                'pip install "halfstep[tensorboard]", then tensorboard --logdir.',
                UserWarning,
                stacklevel=2,
            )

    def save_state(self) -> dict:
        """The last step seen, and the averages of the noise scale, for a `Checkpoint`."""
        return {"step": self._step, **self._gauges.save_state()}

    def load_state(self, value: dict) -> None:
        """Makes the next run continue from what `save_state` returned."""
        self._gauges.load_state(value)
        self.load_no_state(value["step"])

    def load_no_state(self, step: int) -> None:
        """Has the next run go on after a step whose checkpoint knows nothing of this folder."""
        self._step = step
        for path in self._directory.glob("events.out.tfevents.*"):
            _keep_to(path, step)

    def __enter__(self) -> TensorBoard:
        self._writer = tf.summary.create_file_writer(str(self._directory))
        self._before = None
        self._shown = {id(one): one.step for one in self._evaluations}
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def __call__(self, visit: Visit) -> None:
        """Writes the points and histograms that are due."""
        if self._writer is None:
            raise RuntimeError("TensorBoard is written by Loop.run; outside of it, use it in a with statement.")
        self._step = visit.counters.data
        rows = self._cadence.rows(visit)
        named = isinstance(self._train_step, OwnStep)
        points = [(visit.first + row, *curve) for row in rows for curve in curves_of(visit, row, named).items()] + (
            [(self._step, *curve) for curve in self._of_the_host(visit).items()] if rows else []
        )
        bins = []
        for one in watched_by(self._train_step) if rows else []:
            if tensors := tensors_of_watch(one):
                points += headroom_points(visit, rows, one, tensors)
                bins += histograms(visit, rows, one, tensors)
        points += self._gauges.points(visit, rows, self._train_step)
        for one in self._evaluations:
            if one.step != self._shown[id(one)]:
                self._shown[id(one)] = one.step
                points += [(one.step, f"{one.name}/{name}", value) for name, value in one.results.items()]
        texts = skip_texts(visit, self._train_step)
        if points or texts:
            with self._writer.as_default():
                for step, text in texts:
                    tf.summary.write(SKIPS, tf.constant([text]), step=step, metadata=TEXT)
                for step, name, value in points:
                    tf.summary.write(name, np.float32(value), step=step, metadata=metadata(name))
                for step, name, table in bins:
                    tf.summary.write(name, table, step=step, metadata=METADATA)
            self._writer.flush()

    def _of_the_host(self, visit: Visit) -> dict[str, float]:
        curves: dict[str, float] = {}
        if visit.counters.known:
            curves["scaler/skipped"] = visit.counters.skipped
        rate = getattr(self._optimizer, "learning_rate", None)
        if rate is not None:
            curves["optimizer/learning_rate"] = float(rate)
        if self._before is not None and visit.seconds > self._before[1]:
            steps, seconds = self._before
            curves["time/steps_per_second"] = (visit.counters.data - steps) / (visit.seconds - seconds)
        self._before = visit.counters.data, visit.seconds
        return curves


def _keep_to(path: pathlib.Path, step: int) -> None:
    """Truncates a file of events before the first of a later step, or before an incomplete one.

    Each record is its length in 8 bytes, a checksum of that in 4, the event, and its checksum in 4: see TensorFlow's
    tensorflow/core/lib/io/record_writer.h.
    """
    with path.open("rb+") as file:
        size, end = os.fstat(file.fileno()).st_size, 0
        while len(head := file.read(12)) == 12:
            following = end + 12 + struct.unpack("<Q", head[:8])[0] + 4
            if following > size:
                break
            if tf.compat.v1.Event.FromString(file.read(following - end - 16)).step > step:
                break
            file.seek(following)
            end = following
        file.truncate(end)


def metadata(name: str) -> tf.compat.v1.SummaryMetadata:
    """Marks a number as a point of a curve, with what the curve shows where that is known."""
    first, _, rest = name.partition("/")
    said = _DESCRIPTIONS.get(name) or _OF_GAUGES.get(first, "")
    if not said:  # Of a part, as in critic/scaler/headroom.
        said = _DESCRIPTIONS.get(rest, "")
    return _marked("scalars", said)


def curves_of(visit: Visit, row: int, named: bool) -> dict[str, float]:
    """The train step's outputs at one step, by the curves' names.

    Args:
        visit: The steps.
        row: The step's index among them.
        named: Whether cause and variable are known by name, and so are texts and no curves.
    """
    values = {name: float(column[row]) for name, column in visit.outputs.items()}
    scales = columns_of(values, "loss_scale")
    left_out = (*_NOT_SHOWN, *scales.values(), *(_AS_TEXT if named else ()))
    curves = {_TAGS.get(name, name): value for name, value in values.items() if name not in left_out}
    for part, name in scales.items():
        curves[f"{part}/scaler/log2_scale".lstrip("/")] = float(np.log2(values[name]))
    return curves


def skip_texts(visit: Visit, train_step: Any) -> list[tuple[int, str]]:
    """A text for each skipped step of a visit, such as "OVERFLOW: dense/kernel"."""
    names = skip_names(visit, train_step)
    pairs = zip(names.get("cause", []), names.get("variable", []), strict=True)
    return [
        (visit.first + row, f"{cause}: {variable}" if variable else cause)
        for row, (cause, variable) in enumerate(pairs)
        if cause
    ]


class GaugeCurves:
    """The points of ready probes, and the averages that the noise scale is the ratio of."""

    def __init__(self) -> None:
        self._averages: dict[str, Averages] = {}

    def save_state(self) -> dict[str, Any]:
        """The averages, as JSON: that of a whole step, and those of parts by their curves."""
        found = {name: one.save_state() for name, one in self._averages.items()}
        whole: dict[str, Any] = {"averages": found.pop(_WHOLE, Averages().save_state())}
        return {**whole, "averages_of_parts": found} if found else whole

    def load_state(self, value: Mapping[str, Any]) -> None:
        """Restores what `save_state` returned."""
        for name, state in {_WHOLE: value["averages"], **value.get("averages_of_parts", {})}.items():
            self._averages.setdefault(name, Averages()).load_state(state)

    def points(self, visit: Visit, rows: Sequence[int], train_step: Any) -> list[tuple[int, str, float]]:
        """The points (step, curve, value) of some steps of a visit, without those that were not measured.

        Args:
            visit: Its steps all count for the averages.
            rows: The indices of the steps to show.
            train_step: The visit's step.
        """
        names = gauges_of(train_step)
        if not names:
            return []
        columns = dict(zip(names, gauge_values(visit.vectors, train_step).astype(np.float64).T, strict=True))
        for name, noise, signal in noise_pairs(names):
            averages = self._averages.setdefault(name, Averages())
            parts = zip(columns.pop(noise).tolist(), columns.pop(signal).tolist(), strict=True)
            seen = [(averages.add(*pair), np.isfinite(pair).all()) for pair in parts]
            columns[name] = np.array([value if known else np.nan for value, known in seen])
        return [
            (visit.first + row, name, float(values[row]))
            for row in rows
            for name, values in columns.items()
            if not np.isnan(values[row])
        ]


def headroom_points(
    visit: Visit, rows: Sequence[int], watched: Watched, tensors: Sequence[Tensor]
) -> list[tuple[int, str, float]]:
    """The headroom at some steps in octaves, as points (step, curve, value); without those that are unknown.

    Args:
        visit: A visit of the step, with what its probes measured.
        rows: The indices of the steps in it.
        watched: A watch of the step. Each part of a `ComposedStep` has curves of its own.
        tensors: Those that it measures.
    """
    seen = measured(visit.vectors, watched)
    chosen = [row for row in rows if seen[row]]
    if not chosen:
        return []
    amax = visit.vectors[watched.output("amax")]
    scale = np.asarray(visit.outputs.get(watched.output("loss_scale"), np.ones(len(amax))), np.float64)[chosen]
    critical = critical_scales(amax[chosen], scale, tensors)
    curves = {
        watched.output("scaler/headroom"): octaves_to_critical(*critical, scale),
        watched.output("activations/headroom"): headroom_of(amax[chosen], tensors),
    }
    return [
        (visit.first + row, name, float(values[place]))
        for place, row in enumerate(chosen)
        for name, values in curves.items()
        if np.isfinite(values[place])
    ]


def histograms(
    visit: Visit, rows: Sequence[int], watched: Watched, tensors: Sequence[Tensor]
) -> list[tuple[int, str, np.ndarray]]:
    """The exponents of each tensor's values at the last of some steps that has counts: step, curve and bins.

    The bins are float64 [bins, 3]: left edge, right edge and count; without zeros, infinities and NaN.
    """
    counts = visit.vectors[watched.output("counts")]
    counted = [row for row in rows if counts[row].any()]
    first, end = observe.bin_of(observe.LOWEST), observe.INFINITY
    found = []
    for tensor, bins in zip(tensors, counts[counted[-1]], strict=True) if counted else []:
        inside = np.flatnonzero(bins[first:end])
        if len(inside):
            exponents = np.arange(inside[0], inside[-1] + 1)
            edges = exponents + observe.LOWEST
            table = np.stack([edges, edges + 1, bins[first:end][exponents]], axis=1).astype(np.float64)
            found.append((visit.first + counted[-1], f"exponents/{tensor.name}", table))
    return found
