"""What the rules of lint read, and the findings that they yield."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import restored
from loops.diagnose.graph.models import Traced, first_batch, trace
from loops.step.train_step import TrainStep
from loops.support.batches import explaining, parts
from loops.support.errors import BadBatch

MARGIN = 10.0
"""The factor by which a layer's inputs may grow in training beyond those on the sample."""
_NOT_RUN = -1.0
_ONE_SIGN = 0.5


class Scaling(NamedTuple):
    """Whether a loss scaler runs, and whether 16-bit weights have masters.

    Attributes:
        scales: Whether the loss is scaled.
        has_masters: Whether 16-bit variables have float32 masters.
        description: The reason in words, such as "the optimizer scales by Dynamic".
    """

    scales: bool
    has_masters: bool
    description: str


@dataclasses.dataclass(frozen=True)
class Subject:
    """What the rules read.

    Attributes:
        model: A model that is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight).
        sample: A batch of tensors.
        scaling: The scaling of the set-up.
        traced: The trace of the model and its loss.
        seen: The inputs of the layers on the sample, measured whenever the model runs on it.
        format: The emulated format that is asked about, or None.
    """

    model: keras.Model
    loss: Callable
    sample: tuple
    scaling: Scaling
    traced: Traced
    seen: InputRanges
    format: str | None


@contextlib.contextmanager
def subject_of(
    model: keras.Model, optimizer: Any, loss: Callable, sample: Any, format: str | None
) -> Iterator[Subject]:
    """Checks and prepares the arguments of lint, and traces the model, whose state is restored at the end.

    Raises:
        scaler.InvalidArgument: For arguments of the wrong kind.
        BadBatch: For a sample that is empty, or does not fit the model and the loss.
        OutOfData: For an empty dataset.
    """
    sample = _checked_sample(model, loss, sample)
    scaling = _scaling_of(optimizer)
    if not model.built:
        with in_one_sentence(), explaining_misfit(model, sample):
            model(tf.nest.map_structure(tf.zeros_like, sample[0]), training=False)
    with restored(model):
        seen = InputRanges(scaler.observe.layers_of(model))
        # This trace is measured too, since a `tf.function` inside the model is traced only once.
        with in_one_sentence(), explaining_misfit(model, sample), seen.measuring():
            traced = trace(model, loss, sample)
        yield Subject(model, loss, sample, scaling, traced, seen, format)


def _checked_sample(model: object, loss: object, sample: Any) -> tuple:
    """Checks a model, a loss and a sample; returns the sample, or the first batch of a dataset, as tensors."""
    sample = first_batch(sample, "lint(sample)")
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(f"lint(model={model!r}): expected a keras.Model.")
    if not callable(loss):
        raise scaler.InvalidArgument(
            f"lint(loss={loss!r}): expected a function of (y, prediction) or a keras.losses.Loss, such as "
            "keras.losses.MeanSquaredError()."
        )
    _, y, _ = parts(sample, "lint")
    if y is None:
        raise scaler.InvalidArgument(
            f"lint(sample={type(sample).__name__}): expected a batch (x, y) or (x, y, sample_weight), such as "
            "next(iter(dataset))."
        )
    given = tuple(part for part in sample if part is not None)
    if not all(hasattr(one, "shape") for one in tf.nest.flatten(given)):
        raise scaler.InvalidArgument(
            "lint(sample): the sample holds Python lists or numbers: expected arrays or tensors, such as "
            "(np.asarray(x), np.asarray(y))."
        )
    tensors = tf.nest.map_structure(tf.convert_to_tensor, given)
    if any(tensor.shape.rank and tensor.shape[0] == 0 for tensor in tf.nest.flatten(tensors)):
        raise BadBatch(f"lint: the sample is empty: {_lengths(tensors)}. Give a batch with at least one example.")
    return tensors


def _scaling_of(optimizer: Any) -> Scaling:
    """The scaling of an optimizer, or of the train step that holds it.

    Raises:
        scaler.InvalidArgument: For anything else.
    """
    if isinstance(optimizer, TrainStep):
        strategy = optimizer.loss_scaler.strategy
        return Scaling(
            _moves(strategy) or optimizer.layerwise is not None,
            not optimizer.allow_16bit_updates,
            f"the TrainStep scales by {type(strategy).__name__}",
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, scaler.LossScaleOptimizer):
        strategy = optimizer.loss_scaler.strategy
        return Scaling(_moves(strategy), True, f"the optimizer scales by {type(strategy).__name__}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return Scaling(True, False, "the optimizer is keras.optimizers.LossScaleOptimizer")
    if isinstance(optimizer, keras.optimizers.Optimizer):
        factor = optimizer.loss_scale_factor
        description = f"the optimizer is {kind}" + (f" with loss_scale_factor={factor:g}" if factor else "")
        return Scaling(bool(factor) and factor != 1, False, description)
    if callable(optimizer):
        return Scaling(False, False, f"the optimizer is the function {getattr(optimizer, '__name__', kind)}")
    raise scaler.InvalidArgument(
        f"lint(optimizer={optimizer!r}): expected a Keras optimizer, an hs.LossScaleOptimizer, an hs.TrainStep "
        "that holds the optimizer, or a function of (grads, variables)."
    )


def _moves(strategy: Any) -> bool:
    """Whether a strategy ever uses a loss scale other than 1."""
    low, high = scaler.strategies.float_bounds_of(strategy)
    fixed = isinstance(strategy, (scaler.NoScaling, scaler.Static)) or float(low) == float(high)
    return not fixed or float(strategy.init().loss_scale) != 1.0


@contextlib.contextmanager
def explaining_misfit(model: keras.Model, sample: tuple) -> Iterator[None]:
    """Turns an error of a model or a loss into one sentence about the sample, if the sample is wrong.

    Raises:
        BadBatch: Instead of the original error, if the sample does not fit.
    """
    try:
        with explaining("lint", model, sample[0], sample[1]):
            yield
    except scaler.ScalerError:
        raise
    except (ValueError, TypeError, tf.errors.OpError):
        tensors = tf.nest.flatten(sample)
        if len({one.shape[0] for one in tensors if one.shape.rank}) < 2:
            raise
        raise BadBatch(
            f"lint: the parts of the sample differ in length: {_lengths(sample)}. Give the same number of each."
        ) from None


@contextlib.contextmanager
def in_one_sentence() -> Iterator[None]:
    """Turns any error of a model or a loss into one sentence, if its cause is unknown.

    Raises:
        BadBatch: Instead of the original error.
    """
    try:
        yield
    except scaler.ScalerError:
        raise
    except Exception as error:
        raise BadBatch(
            f"lint: the model or the loss failed on the sample: {last_line(error)}. Run a train step on this "
            "sample first."
        ) from error


def last_line(error: Exception) -> str:
    """An error's type and message, without the text that Keras and AutoGraph add."""
    text = re.sub(r"\x1b\[\d*m", "", str(error)).partition("Arguments received by")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = f"{type(error).__name__}: "
    message = lines[-1].removeprefix(kind) if lines else ""
    return kind + message[:200].rstrip(".")


def _lengths(sample: tuple) -> str:
    """The lengths of the parts, such as "x holds 16 examples, y holds 8 examples"."""
    lengths = []
    for name, part in zip(("x", "y", "sample_weight"), sample, strict=False):
        sizes = sorted({one.shape[0] for one in tf.nest.flatten(part) if one.shape.rank})
        lengths.append(f"{name} holds {' and '.join(map(str, sizes))} examples")
    return ", ".join(lengths)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The floating-point inputs of a layer on the sample.

    Attributes:
        amax: The largest magnitude; of several inputs, the smallest of theirs.
        one_signed: Whether most values have one sign, as after a ReLU.
    """

    amax: float
    one_signed: bool

    def reach(self, magnitude: float, one_signed: bool) -> bool:
        """Whether the layer may plausibly get inputs of this magnitude in training."""
        return magnitude <= self.amax * (MARGIN if self.one_signed or not one_signed else 1.0)


class InputRanges:
    """Measures the inputs of layers while a model runs.

    Args:
        layers: The layers to measure.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer]):
        self._layers = list(layers)
        # Variables can also be assigned inside a loop, or inside a function that the model calls.
        self._measured = {id(one): tf.Variable([_NOT_RUN, 0.0, 0.0], trainable=False) for one in self._layers}

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures the layers whenever a function runs that was traced in this context."""

        def measure(layer: keras.layers.Layer, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
            _measure(self._measured[id(layer)], (args, kwargs))
            return call(*args, **kwargs)

        with scaler.authoring.calls_through(self._layers, measure):
            yield

    def inputs(self, layer: keras.layers.Layer) -> Inputs | None:
        """The inputs of a layer, or None if it did not run."""
        amax, total, magnitudes = self._measured[id(layer)].numpy().tolist()
        return None if amax == _NOT_RUN else Inputs(amax, abs(total) > _ONE_SIGN * magnitudes)


@scaler.authoring.no_autograph
def _measure(found: tf.Variable, given: Any) -> None:
    inputs = [one for one in tf.nest.flatten(given) if tf.is_tensor(one) and one.dtype.is_floating]
    if not inputs:
        return
    with tf.name_scope("halfstep_seen"):
        amax, total, magnitudes = zip(*map(_sizes, inputs), strict=True)
        largest = tf.maximum(found[0], _least(tf.stack(amax)))
        found.assign(tf.stack([largest, found[1] + tf.add_n(total), found[2] + tf.add_n(magnitudes)]))


def _least(amax: tf.Tensor) -> tf.Tensor:
    """The smallest that is not 0: an input of zeros, such as an initial state, says nothing about the range."""
    least = tf.reduce_min(tf.where(amax > 0.0, amax, float("inf")))
    return tf.where(tf.math.is_inf(least), 0.0, least)


def _sizes(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The largest magnitude, the mean, and the mean magnitude of the finite values."""
    values = tf.cast(tensor, tf.float32)
    values = tf.where(tf.math.is_finite(values), values, 0.0)
    count = tf.maximum(tf.cast(tf.size(values), tf.float32), 1.0)
    magnitudes = tf.abs(values)
    amax = tf.maximum(tf.reduce_max(magnitudes), 0.0)  # An empty tensor has no largest value.
    return amax, tf.reduce_sum(values) / count, tf.reduce_sum(magnitudes) / count


class Kind(str, enum.Enum):
    """What a finding is about."""

    SAMPLE = "sample"
    NOT_RUN = "not_run"
    FLOAT16_ON_THE_SAMPLE = "float16_on_the_sample"
    MODEL_ON_THE_SAMPLE = "model_on_the_sample"
    NO_SCALING = "no_scaling"
    NEEDLESS_SCALING = "needless_scaling"
    NO_MASTERS = "no_masters"
    LOSS = "loss"
    OUTPUT = "output"
    CONSTANT = "constant"
    WEIGHTS = "weights"
    STATISTICS = "statistics"
    INDICES = "indices"
    FAILS_UNDER_STRESS = "fails_under_stress"
    ENLARGES = "enlarges"
    NOT_STRESSED = "not_stressed"
    SHAPES = "shapes"
    XLA = "xla"
    FORMAT = "format"


class Severity(str, enum.Enum):
    """Whether a finding hurts."""

    HURTS = "hurts"
    NOTE = "note"
    """It is harmless, at least on inputs such as the sample's."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem that lint found.

    Attributes:
        layer: The layer's name, or its path if several layers have that name; None for the whole set-up.
        finding: The problem, in one sentence. For a note it begins with "note: ".
        measured: The measurement behind it, with numbers.
        instead: What to write instead.
        kind: What the finding is about.
        severity: Whether it hurts.
    """

    layer: str | None
    finding: str
    measured: str
    instead: str
    kind: Kind
    severity: Severity = Severity.HURTS

    @property
    def is_note(self) -> bool:
        """Whether it is harmless, at least on inputs such as the sample's."""
        return self.severity is Severity.NOTE


def note(layer: str | None, finding: str, measured: str, instead: str, kind: Kind) -> Finding:
    """Makes a finding that is harmless."""
    return Finding(layer, f"note: {finding}", measured, instead, kind, Severity.NOTE)


class Texts(NamedTuple):
    """What is said of one kind of problem: each text is a format of the values that a rule measured."""

    kind: Kind
    finding: str
    measured: str
    instead: str
    severity: Severity = Severity.HURTS

    def at(self, layer: str | None, /, **values: Any) -> Finding:
        """The finding about a layer, with these values."""
        finding, measured, instead = (text.format_map(values).strip() for text in self[1:4])
        make = note if self.severity is Severity.NOTE else Finding
        return make(layer, finding, measured, instead, self.kind)
