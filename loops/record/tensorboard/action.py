"""Writes event files for TensorBoard."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import struct
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from loops.loop.visit import Cadence, Seconds, Visit
from loops.record.tensorboard.curves import (
    METADATA,
    SKIPS,
    TEXT,
    GaugeCurves,
    curves_of,
    headroom_curves,
    histograms,
    metadata,
    skip_texts,
)
from loops.record.trace.tensors import tensors_of
from loops.step.parts import OwnStep
from loops.step.probing import watched_by
from loops.support.written.place import Place, as_path, check_folder

if TYPE_CHECKING:
    from loops.loop.loop import Loop


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

    def load_state(self, value: dict | int) -> None:
        """Makes the next run continue from what `save_state` returned, before 0.3 the step alone."""
        if isinstance(value, dict):
            self._gauges.load_state(value)
        self._step = step = value["step"] if isinstance(value, dict) else value
        for path in self._directory.glob("events.out.tfevents.*"):
            _keep_to(path, step)

    def load_no_state(self, step: int) -> None:
        """Has the next run go on after a step whose checkpoint knows nothing of this folder."""
        self.load_state(step)

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
        shown = bool(rows and watched_by(self._train_step) and tensors_of(self._train_step))
        bins = histograms(visit, rows, self._train_step) if shown else []
        points += headroom_curves(visit, rows, self._train_step) if shown else []
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
