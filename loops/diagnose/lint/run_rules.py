"""Rules that run the whole model: on the sample, compiled by XLA, and in a narrower format."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import LayerCall
from loops.diagnose.graph.changes import layers_in_float32, restored, rounding_is_no_warning
from loops.diagnose.graph.models import derivatives_of, functional_operations, loss_of
from loops.diagnose.graph.origin import Frame, origins, pass_of
from loops.diagnose.graph.scan import Scan, scan
from loops.diagnose.lint.subject import Finding, Kind, Severity, Subject, Texts, explaining_misfit, in_one_sentence
from loops.support.batches import parts
from loops.support.text import one_line

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


_XLA = Texts(
    Kind.XLA,
    "XLA cannot compile the {said} of {kind} in {policy}.",
    "Without XLA it runs. With it: {error}",
    "{other} Or do not compile the step as a whole: hs.Loop(..., jit_compile=False), and jit_compile=False in Keras's "
    "compile.",
)
_UNFIT = Texts(
    Kind.FORMAT,
    "{format} moves the gradients too far: by more than the noise of the batch, or by half of their norm.",
    "With the products of this layer alone in {format}, they move by {error:.1%} of their norm; those of the two "
    "halves of the sample lie {noise:.1%} from their mean.",
    "Leave this layer as it is: hs.formats.emulated({format!r})(model, only=[...]) takes the others.",
)
_FIT = Texts(
    Kind.FORMAT,
    "in {format} these layers move the gradients by less than the noise of the batch does.",
    "{listed}, each alone; the noise is {noise:.1%}.",
    "Nothing. To train in it: hs.formats.emulated, see docs/formats.md.",
    Severity.NOTE,
)
_MOST = 0.5
"""The largest error over the norm, whatever the noise: beyond it the gradients point elsewhere."""


def not_compiled(subject: Subject) -> Iterator[Finding]:
    """Layers whose forward or backward pass XLA refuses to compile on this machine's first device.

    Inner layers come first, and a failure is reported once, where it begins. Where it takes several layers, as in a
    model whose layers compile one by one, that is the last one that helps in float32. A layer is called with the shapes
    of the sample.
    """
    traced = subject.traced
    done: set[int] = set()
    for call in traced.calls:
        if id(call.layer) in done:
            continue
        done.add(id(call.layer))
        inside = [one for one in reversed(traced.inside(call.layer)) if not isinstance(one, keras.Model)]
        why = _why_not(call, inside)
        if why is not None:
            done |= {id(one) for one in call.inside}
            layer, said, error, helps = why
            kind = type(layer).__name__
            other = "Put another layer in its place: XLA refuses it in float32, too."
            if helps:
                other = f"Give this layer dtype='float32': {kind}(..., dtype='float32')."
                if isinstance(layer, keras.Model):  # Most take no dtype.
                    other = "Give all layers of this model dtype='float32'."
            policy = layer.dtype_policy.name
            yield _XLA.at(traced.place(layer), said=said, kind=kind, policy=policy, error=error, other=other)


def _why_not(call: LayerCall, inside: Sequence[keras.layers.Layer]) -> tuple[keras.layers.Layer, str, str, bool] | None:
    """Which layer and pass fail, the error, and whether float32 helps; None if XLA compiles both, or none runs without.

    Args:
        call: The call of the layer.
        inside: The layers inside of it.
    """
    if any(not spec.shape.is_fully_defined() for spec in call.specs):
        return None
    values = [tf.zeros(spec.shape, spec.dtype) for spec in call.specs]
    with restored(call.layer):
        for said, backward in (("forward pass", False), ("backward pass", True)):
            try:
                _run(call, values, backward, compiled=False)
            except Exception:  # Of any kind, from a user's layer: what fails without XLA has another cause.
                return None
            try:
                _run(call, values, backward, compiled=True)
            except Exception as error:  # XLA refuses with errors of several kinds.
                layers = (one for one in (*inside, call.layer) if _compiles_in_float32(one, call, values, backward))
                helps = next(layers, None)
                return helps or call.layer, said, _shortened(error), helps is not None
    return None


def _compiles_in_float32(layer: Any, call: LayerCall, values: Sequence[tf.Tensor], backward: bool) -> bool:
    if layer is call.layer:
        values = [tf.cast(value, tf.float32) if value.dtype.is_floating else value for value in values]
    try:
        with layers_in_float32(scaler.observe.layers_of(layer)):
            _run(call, values, backward, compiled=True)
    except Exception:  # Of any kind, as above.
        return False
    return True


def _shortened(error: Exception) -> str:
    """The error without the name of the graph, which no user knows."""
    return re.sub(r" when trying to compile graph \S+ on", " on", one_line(error))[:200]


def _run(call: LayerCall, values: Sequence[tf.Tensor], backward: bool, *, compiled: bool) -> None:
    def run(*given: tf.Tensor) -> list[tf.Tensor]:
        return call.differentiated(given, call.layer.trainable_variables)[1] if backward else call.again(given)

    tf.function(run, jit_compile=compiled).get_concrete_function(*values)(*values)


def unfit_for_format(subject: Subject) -> Iterator[Finding]:
    """Layers whose rounding in a format is above the noise of the batch, and a note about the others."""
    format = str(subject.format)
    emulated = scaler.formats.emulated(format)
    if int(tf.nest.flatten(subject.sample)[0].shape[0]) < 2 or not emulated.layers_of(subject.model):
        return
    fit = []
    for layer, error, noise in _errors_in(emulated, subject):
        place = subject.traced.place(layer)
        if error <= min(noise, _MOST):
            fit.append(f"{place} {error:.1%}")
        else:  # What is NaN does not fit either.
            yield _UNFIT.at(place, format=format, error=error, noise=noise)
    if fit:
        yield _FIT.at(None, format=format, listed=", ".join(fit), noise=noise)


def _errors_in(format: scaler.formats.Emulated, subject: Subject) -> list[tuple]:
    """What rounding one layer's products alone does to the gradients of all weights.

    Every layer computes in float32. The sample is run whole, and in two halves: half the distance between their
    gradients is how far the gradient of such a batch lies from that of the data, about.

    Args:
        format: The format. Delayed scaling is measured as current scaling, since there are no past steps.
        subject: A model, and a sample of at least two examples.

    Returns:
        A tuple of layer, its error and the noise, both over the norm of the gradients, for each layer that can be
        emulated.
    """
    model = subject.model
    size = int(tf.nest.flatten(subject.sample)[0].shape[0])

    def gradients(first: int = 0, last: int = size) -> np.ndarray:
        part = tf.nest.map_structure(lambda values: values[first:last], subject.sample)
        with restored(model):
            found = derivatives_of(model, subject.loss, part)
        wide = [tf.cast(tf.convert_to_tensor(one), tf.float32) for one in found]
        return np.concatenate([np.ravel(one) for one in wide] or [np.zeros(0)])

    with layers_in_float32(scaler.observe.layers_of(model)):
        whole = gradients()
        norm = max(float(np.linalg.norm(whole)), float(np.finfo(np.float32).tiny))
        halves = gradients(0, size // 2), gradients(size // 2)
        noise = float(np.linalg.norm(halves[0] - halves[1])) / 2 / norm
        errors = []
        for path, layer in format.layers_of(model).items():
            with format.tried(model, [path]):
                errors.append((layer, float(np.linalg.norm(gradients() - whole)) / norm, noise))
    return errors
