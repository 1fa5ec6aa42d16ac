"""Which layers XLA cannot compile, forward or backward, in the model's own policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import LayerCall, Traced
from loops.diagnose.graph.changes import restored
from loops.diagnose.graph.models import layers_in_float32
from loops.diagnose.lint.finding import Finding, Kind
from loops.support.text import one_line


def not_compiled(traced: Traced) -> list[Finding]:
    """A finding for each layer whose forward or backward pass XLA refuses to compile on this machine's first device.

    Inner layers come first, and a failure is reported once, where it begins. Where it takes several layers, as in a
    model whose layers compile one by one, that is the last one that helps in float32. A layer is called with the shapes
    of the sample.
    """
    findings: list[Finding] = []
    faulty: set[int] = set()
    done: set[int] = set()
    for call in traced.calls:
        if id(call.layer) in faulty | done:
            continue
        done.add(id(call.layer))
        inside = [one for one in reversed(traced.inside(call.layer)) if not isinstance(one, keras.Model)]
        why = _why_not(call, inside)
        if why is not None:
            faulty |= {id(one) for one in (call.layer, *call.inside)}
            findings.append(_finding(traced.place(why[0]), *why))
    return findings


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


def _finding(place: str, layer: keras.layers.Layer, said: str, error: str, float32_helps: bool) -> Finding:
    kind, policy = type(layer).__name__, layer.dtype_policy.name
    other = "Put another layer in its place: XLA refuses it in float32, too."
    if float32_helps:
        other = f"Give this layer dtype='float32': {kind}(..., dtype='float32')."
        if isinstance(layer, keras.Model):  # Most take no dtype.
            other = "Give all layers of this model dtype='float32'."
    return Finding(
        place,
        f"XLA cannot compile the {said} of {kind} in {policy}.",
        f"Without XLA it runs. With it: {error}",
        f"{other} Or do not compile the step as a whole: hs.Loop(..., jit_compile=False), and jit_compile=False in "
        "Keras's compile.",
        Kind.XLA,
    )
