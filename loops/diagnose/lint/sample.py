"""The rule about the sample: runs the model on it, as it is and in float32, and finds what is not finite and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import functional_operations, loss_of, rounding_is_no_warning
from loops.diagnose.graph.changes import layers_in_float32, restored
from loops.diagnose.graph.origin import Frame, origins, pass_of
from loops.diagnose.graph.scan import Scan, scan
from loops.diagnose.lint.finding import Finding, Kind, Severity, Texts
from loops.diagnose.lint.subject import Subject, explaining_misfit, in_one_sentence
from loops.support.batches import parts

_NOT_RUN = Texts(
    Kind.NOT_RUN,
    "the model could not be run on the sample, so its outputs there are unknown.",
    "It raised {error}",
    "Run a train step on this sample.",
    Severity.NOTE,
)
_SAMPLE = Texts(
    Kind.SAMPLE,
    "{name} of the sample holds a value that is {problem}, which spreads to the results.",
    "{name} was checked as given, before any layer.",
    "Remove or replace such values in the data, or give lint a sample without them.",
)
_IN_FLOAT16 = Texts(
    Kind.FLOAT16_ON_THE_SAMPLE,
    "on your sample {failed} in float16; finite in float32.",
    "The whole sample was run in both. {origin}",
    "Compute this in float32 (a layer's dtype='float32', or a cast before the operation), or keep its inputs smaller.",
)
_CAST_BY_THE_MODEL = Texts(
    Kind.MODEL_ON_THE_SAMPLE,
    "on your sample {failed}; it begins in float16, to which the model itself casts.",
    "The whole sample was run. {origin}",
    "Remove this cast to float16, or use values within its range: it ends at 65504.",
)
_IN_ANY_DTYPE = Texts(
    Kind.MODEL_ON_THE_SAMPLE,
    "on your sample {failed} {where}: the cause is the model or the sample itself.",
    "The whole sample was run. {origin}",
    "Fix this first: no dtype and no loss scale helps. Check the scale of the data, and logarithms, roots and "
    "divisions.",
)
_SCALE_THE_DATA = "Scale the data: float16 ends at 65504."
_RAISED = (ValueError, TypeError, tf.errors.OpError)
_PROBLEMS = {1: "infinite", 2: "NaN"}


@in_one_sentence()
def on_the_sample(subject: Subject) -> list[Finding]:
    """Non-finite values in the sample, in the model's outputs, in the loss, or in `model.losses`.

    Raises:
        BadBatch: If the loss cannot take the sample.
    """
    try:
        with explaining_misfit(subject.model, subject.sample), subject.seen.measuring():
            failed = _failed(subject)
    except tf.errors.OpError as error:
        return [_NOT_RUN.at(None, error=f"{type(error).__name__}: {error.message.strip().splitlines()[0][:200]}")]
    if not failed:
        return []
    for name, part in zip(("x", "y", "sample_weight"), subject.sample, strict=False):
        problem = max((int(_problem(one)) for one in tf.nest.flatten(part)), default=0)
        if problem:
            return [_SAMPLE.at(None, name=name, problem=_PROBLEMS[problem])]
    halves = [layer for layer in scaler.observe.layers_of(subject.model) if layer.compute_dtype == "float16"]
    try:
        with layers_in_float32(halves):
            also = _failed(subject)
    except _RAISED:
        also = {}  # The model casts to float16 by itself.
    alone = {name: problem for name, problem in failed.items() if name not in also}
    everywhere = {name: problem for name, problem in failed.items() if name in also}
    findings = []
    if alone:
        findings.append(_finding(_IN_FLOAT16, alone, _origin(subject, set(alone))))
    if everywhere:
        with layers_in_float32(halves):
            origin = _origin(subject, set(everywhere))
        where = "in float16, and not finite in float32 either" if halves else "although nothing computes in float16"
        findings.append(_finding(_CAST_BY_THE_MODEL if origin.in_half else _IN_ANY_DTYPE, everywhere, origin, where))
    return findings


def _forward(model: keras.Model, loss: Callable, sample: tuple) -> dict[str, tf.Tensor]:
    """The outputs, the loss and the layers' additional losses, by their names in a finding."""
    x, y, weight = parts(sample, "lint")
    prediction = model(x, training=True)
    value = loss_of(loss, prediction, y, weight)
    outputs = [one for one in tf.nest.flatten(prediction) if tf.is_tensor(one)]
    named = {"the output" if len(outputs) == 1 else f"output {place}": one for place, one in enumerate(outputs)}
    named["the loss"] = tf.convert_to_tensor(value)
    named.update({f"model.losses[{place}]": tf.convert_to_tensor(one) for place, one in enumerate(model.losses)})
    return named


def _failed(subject: Subject) -> dict[str, str]:
    """The non-finite outputs and losses by name, each "infinite" or "NaN"."""

    def run(sample: tuple) -> dict[str, tf.Tensor]:
        outputs = _forward(subject.model, subject.loss, sample)
        return {name: _problem(one) for name, one in outputs.items()}

    with restored(subject.model), rounding_is_no_warning():
        # Calling a new `tf.function` each time would make TensorFlow warn about retracing.
        concrete = tf.function(run).get_concrete_function(subject.sample)
        problems = {name: int(one) for name, one in concrete(subject.sample).items()}
    return {name: _PROBLEMS[problem] for name, problem in problems.items() if problem}


def _problem(tensor: tf.Tensor) -> tf.Tensor:
    """An integer: 2 if a tensor holds a NaN, 1 if it holds an infinity, else 0."""
    if not tensor.dtype.is_floating:
        return tf.constant(0)
    kinds = tf.where(tf.math.is_nan(tensor), 2, tf.where(tf.math.is_inf(tensor), 1, 0))
    return tf.maximum(tf.reduce_max(kinds), 0)  # An empty tensor has no largest value.


class _Origin(NamedTuple):
    """The place where a non-finite value began.

    Attributes:
        layer: The name of the layer, or of a functional model's operation, or None.
        description: A sentence that names the operation, or "".
        in_data: Whether it began in the sample, when it was cast to 16 bits.
        in_half: Whether the operation computes in float16.
    """

    layer: str | None = None
    description: str = ""
    in_data: bool = False
    in_half: bool = False


def _origin(subject: Subject, names: set[str]) -> _Origin:
    """The place where these non-finite values began, found by measuring every tensor; empty if that fails."""
    failed: list[str] = []

    def take(sample: tuple) -> dict[str, tf.Tensor]:
        outputs = _forward(subject.model, subject.loss, sample)
        failed[:] = [outputs[name].name for name in outputs if name in names]
        return {name: _problem(one) for name, one in outputs.items()}

    places: Mapping[str, Any] = {
        **{subject.traced.place(layer): layer for layer in scaler.observe.layers_of(subject.model)},
        **{operation.name: operation for operation in functional_operations(subject.model)},
    }
    with contextlib.suppress(*_RAISED), restored(subject.model), rounding_is_no_warning():
        found = scan(take, subject.sample, places, [])
        first = next(iter(origins(found.frames, failed)), None)
        if first is not None:
            in_data = pass_of(first, found.frames) == "data"
            return _Origin(first.layer, _describe(first, found), in_data, first.dtype == "float16")
    return _Origin()


def _describe(frame: Frame, found: Scan) -> str:
    at = f" of {frame.layer}" if frame.layer else ""
    line = found.line(frame.name) or ""
    where = f" ({line})" if line and not line.startswith("keras/") else ""
    given = [found.frames[name].amax for name in frame.inputs if name in found.frames]
    reach = f", whose inputs reach {max(given):.4g}" if given else ""
    return f"It begins in the operation {frame.kind}{at}{where}{reach}."


def _finding(texts: Texts, failed: Mapping[str, str], origin: _Origin, where: str = "") -> Finding:
    if origin.in_data and texts is not _IN_ANY_DTYPE:
        texts = texts._replace(instead=_SCALE_THE_DATA)
    listed = ", ".join(f"{name} is {problem}" for name, problem in failed.items())
    return texts.at(origin.layer, failed=listed, origin=origin.description, where=where)
