"""Runs the model on the sample, as it is and in float32, and finds what is not finite and why."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import Traced, functional_operations, loss_of, rounding_is_no_warning
from loops.diagnose.graph.changes import restored
from loops.diagnose.graph.models import layers_in_float32
from loops.diagnose.graph.origin import Frame, origins, pass_of
from loops.diagnose.graph.scan import Scan, scan
from loops.diagnose.lint.arguments import explaining_misfit
from loops.diagnose.lint.finding import Finding, Kind, note
from loops.diagnose.lint.input_range import InputRanges
from loops.support.batches import parts

_RAISED = (ValueError, TypeError, tf.errors.OpError)
_PROBLEMS = {1: "infinite", 2: "NaN"}


def sample_findings(
    traced: Traced, model: keras.Model, loss: Callable, sample: tuple, seen: InputRanges
) -> list[Finding]:
    """Findings for non-finite values in the sample, in the model's outputs, in the loss, or in `model.losses`.

    Args:
        traced: The trace of the model, which names its layers.
        model: A model that is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight).
        sample: A batch of tensors.
        seen: Measures the inputs of the layers during this run.

    Raises:
        BadBatch: If the loss cannot take the sample.
    """
    try:
        with explaining_misfit(model, sample), seen.measuring():
            failed = _failed(model, loss, sample)
    except tf.errors.OpError as error:
        return [_not_run(error)]
    if not failed:
        return []
    spoilt = _bad_sample(sample)
    if spoilt:
        return [spoilt]
    halves = [layer for layer in scaler.observe.layers_of(model) if layer.compute_dtype == "float16"]
    try:
        with layers_in_float32(halves):
            also = _failed(model, loss, sample)
    except _RAISED:
        also = {}  # The model casts to float16 by itself.
    alone = {name: problem for name, problem in failed.items() if name not in also}
    everywhere = {name: problem for name, problem in failed.items() if name in also}
    findings = []
    if alone:
        origin = _origin(traced, model, loss, sample, set(alone))
        findings.append(_float16_finding(alone, origin))
    if everywhere:
        with layers_in_float32(halves):
            origin = _origin(traced, model, loss, sample, set(everywhere))
        findings.append(_model_finding(everywhere, origin, bool(halves)))
    return findings


def _bad_sample(sample: tuple) -> Finding | None:
    """A finding if the sample itself is not finite."""
    for name, part in zip(("x", "y", "sample_weight"), sample, strict=False):
        problem = max((int(_problem(one)) for one in tf.nest.flatten(part)), default=0)
        if problem:
            return Finding(
                None,
                f"{name} of the sample holds a value that is {_PROBLEMS[problem]}, which spreads to the results.",
                f"{name} was checked as given, before any layer.",
                "Remove or replace such values in the data, or give lint a sample without them.",
                Kind.SAMPLE,
            )
    return None


def _not_run(error: tf.errors.OpError) -> Finding:
    return note(
        None,
        "the model could not be run on the sample, so its outputs there are unknown.",
        f"It raised {type(error).__name__}: {error.message.strip().splitlines()[0][:200]}",
        "Run a train step on this sample.",
        Kind.NOT_RUN,
    )


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


def _failed(model: keras.Model, loss: Callable, sample: tuple) -> dict[str, str]:
    """The non-finite outputs and losses by name, each "infinite" or "NaN"."""

    def run(sample: tuple) -> dict[str, tf.Tensor]:
        return {name: _problem(one) for name, one in _forward(model, loss, sample).items()}

    with restored(model), rounding_is_no_warning():
        # Calling a new `tf.function` each time would make TensorFlow warn about retracing.
        concrete = tf.function(run).get_concrete_function(sample)
        problems = {name: int(one) for name, one in concrete(sample).items()}
    return {name: _PROBLEMS[problem] for name, problem in problems.items() if problem}


def _problem(tensor: tf.Tensor) -> tf.Tensor:
    """An integer: 2 if a tensor holds a NaN, 1 if it holds an infinity, else 0."""
    if not tensor.dtype.is_floating:
        return tf.constant(0)
    kinds = tf.where(tf.math.is_nan(tensor), 2, tf.where(tf.math.is_inf(tensor), 1, 0))
    return tf.maximum(tf.reduce_max(kinds), 0)  # An empty tensor has no largest value.


@dataclasses.dataclass(frozen=True)
class _Origin:
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


def _origin(traced: Traced, model: keras.Model, loss: Callable, sample: tuple, names: set[str]) -> _Origin:
    """The place where these non-finite values began, found by measuring every tensor; empty if that fails."""
    failed: list[str] = []

    def take(sample: tuple) -> dict[str, tf.Tensor]:
        outputs = _forward(model, loss, sample)
        failed[:] = [outputs[name].name for name in outputs if name in names]
        return {name: _problem(one) for name, one in outputs.items()}

    places: Mapping[str, Any] = {
        **{traced.place(layer): layer for layer in scaler.observe.layers_of(model)},
        **{operation.name: operation for operation in functional_operations(model)},
    }
    with contextlib.suppress(*_RAISED), restored(model), rounding_is_no_warning():
        found = scan(take, sample, places, [])
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


def _float16_finding(failed: dict[str, str], origin: _Origin) -> Finding:
    return Finding(
        origin.layer,
        f"on your sample {_list(failed)} in float16; finite in float32.",
        f"The whole sample was run in both. {origin.description}".strip(),
        "Scale the data: float16 ends at 65504."
        if origin.in_data
        else "Compute this in float32 (a layer's dtype='float32', or a cast before the operation), or keep its inputs "
        "smaller.",
        Kind.FLOAT16_ON_THE_SAMPLE,
    )


def _model_finding(failed: dict[str, str], origin: _Origin, has_halves: bool) -> Finding:
    if origin.in_half:
        return Finding(
            origin.layer,
            f"on your sample {_list(failed)}; it begins in float16, to which the model itself casts.",
            f"The whole sample was run. {origin.description}",
            "Scale the data: float16 ends at 65504."
            if origin.in_data
            else "Remove this cast to float16, or use values within its range: it ends at 65504.",
            Kind.MODEL_ON_THE_SAMPLE,
        )
    where = "in float16, and not finite in float32 either" if has_halves else "although nothing computes in float16"
    return Finding(
        origin.layer,
        f"on your sample {_list(failed)} {where}: the cause is the model or the sample itself.",
        f"The whole sample was run. {origin.description}".strip(),
        "Fix this first: no dtype and no loss scale helps. Check the scale of the data, and logarithms, roots and "
        "divisions.",
        Kind.MODEL_ON_THE_SAMPLE,
    )


def _list(failed: dict[str, str]) -> str:
    """The failures in words, such as "the output is infinite, the loss is NaN"."""
    return ", ".join(f"{name} is {problem}" for name, problem in failed.items())
