"""Rules that are asked for: which layers XLA cannot compile, and which lose too much in a narrower format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import LayerCall, derivatives_of
from loops.diagnose.graph.changes import layers_in_float32, restored
from loops.diagnose.lint.finding import Finding, Kind, Severity, Texts
from loops.diagnose.lint.subject import Subject
from loops.support.text import one_line

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
    run = tf.function(lambda *given: _pass(call, given, backward), jit_compile=compiled)
    run.get_concrete_function(*values)(*values)


def _pass(call: LayerCall, given: Sequence[tf.Tensor], backward: bool) -> Any:
    watched = [one for one in given if one.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        outputs = call.again(given)
    if not backward:
        return outputs
    sources = [*watched, *call.layer.trainable_variables]
    return tape.gradient(outputs, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)


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
