"""From what failed under stress to a finding, and how far a layer is stressed at all."""

from __future__ import annotations

import keras
import numpy as np

import scaler
from loops.lint.finding import Finding, note
from loops.lint.stress import CannotStress, Failure, float_inputs, stress
from loops.lint.traced import LayerCall

_ALONE, _SEVERAL, _MANY = 5e3, 1e3, 10.0
"""The largest input of a layer by itself, of one that calls others with weights, and of one that calls many."""
_FEW_LAYERS = 8
_WORDS = (("nan", "NaN"), ("inf", "infinite"), ("zero", "all zeros"))
_LARGEST = scaler.float_format("float16").max


def limit_of(weighted_inside: int) -> float:
    """Up to which magnitude a layer is stressed.

    Ordinary layers keep their output within 7 times their input: from 5e3 on it may overflow with no fault of theirs. A
    layer that calls others multiplies their factors.

    Args:
        weighted_inside: How many layers with weights it calls.
    """
    if not weighted_inside:
        return _ALONE
    return _SEVERAL if weighted_inside <= _FEW_LAYERS else _MANY


def judge(call: LayerCall, weighted_inside: int) -> list[Finding]:
    """Stresses a layer, and says what failed; a list of one finding or none."""
    try:
        failures = stress(call, limit_of(weighted_inside))
    except CannotStress as error:
        return [
            note(
                call.layer.name,
                "this layer could not be stressed, so nothing is known of it.",
                f"Run alone it raised {error}",
                "Look at its limits in float16 yourself, or give it dtype='float32'.",
            )
        ]
    faults = [failure for failure in failures if failure.kind != "large"]
    if faults:
        return [_fault(call.layer, faults)]
    # Of several inputs the true output may be their product, which no layer can help.
    if failures and not weighted_inside and float_inputs(call) == 1:
        return [_too_large(call.layer, failures[0])]
    return []


def unfit_weights(layer: keras.layers.Layer) -> list[Finding]:
    """A finding for weights of a layer itself that float16 cannot hold."""
    if layer.compute_dtype != "float16":
        return []
    inner = {id(variable) for one in scaler.observe.layers_of(layer)[1:] for variable in one.weights}
    for variable in layer.trainable_variables:
        amax = float(np.max(np.abs(np.asarray(variable.numpy(), np.float32)), initial=0.0))
        if id(variable) not in inner and not amax <= _LARGEST:
            return [
                Finding(
                    layer.name,
                    "a weight is too large for float16, in which the layer computes.",
                    f"The largest magnitude of {variable.path} is {amax:g}; float16 ends at 65504.",
                    "Find out why it grew (learning rate, no weight decay), or give this layer dtype='float32'.",
                )
            ]
    return []


def unfit_statistics(layer: keras.layers.Layer) -> list[Finding]:
    """A finding for a Normalization whose mean or variance has become infinite: it holds them in its compute dtype."""
    if not isinstance(layer, keras.layers.Normalization) or layer.compute_dtype != "float16":
        return []
    held = {"mean": layer.mean, "variance": layer.variance}
    beyond = [name for name, value in held.items() if value is not None and not np.all(np.isfinite(np.asarray(value)))]
    if not beyond:
        return []
    return [
        Finding(
            layer.name,
            f"the {beyond[0]} that it normalises by is too large for float16.",
            f"{layer.name}.{beyond[0]} is infinite; float16 ends at 65504.",
            "Give this layer dtype='float32' and adapt it anew: keras.layers.Normalization(..., dtype='float32').",
        )
    ]


def _fault(layer: keras.layers.Layer, faults: list[Failure]) -> Finding:
    kind = type(layer).__name__
    backward = all(failure.backward for failure in faults)
    what = "its gradient" if backward else "its output"
    return Finding(
        layer.name,
        f"{kind} fails in float16: {what} is {_kinds(faults)} where float32 is finite and float16 could hold it.",
        _ranges(faults),
        f"Give this layer dtype='float32': keras.layers.{kind}(..., dtype='float32')."
        if type(layer).__module__.startswith("keras.")
        else f"Give this layer dtype='float32': {kind}(..., dtype='float32').",
    )


def _too_large(layer: keras.layers.Layer, failure: Failure) -> Finding:
    ratio = failure.reference / failure.magnitude if failure.magnitude else float("inf")
    return Finding(
        layer.name,
        f"{type(layer).__name__} enlarges its input {ratio:.3g} times, and overflows in float16 early.",
        f"At inputs of {failure.magnitude:g} the output is {failure.reference:.3g} in float32; float16 ends at 65504. "
        "Layers with Glorot, He or orthogonal kernels stay below 7 times.",
        "Take a mean in the place of a sum, use smaller weights, or give this layer dtype='float32'.",
    )


def _kinds(faults: list[Failure]) -> str:
    kinds = {failure.kind for failure in faults}
    return " or ".join(text for kind, text in _WORDS if kind in kinds)


def _ranges(faults: list[Failure]) -> str:
    """At which magnitudes, by pass."""
    said = []
    for backward, name in ((False, "forward"), (True, "backward")):
        at = sorted({failure.magnitude for failure in faults if failure.backward == backward})
        if at:
            said.append(f"{name} with inputs of magnitude {', '.join(f'{one:g}' for one in at)}")
    return f"Run alone, it failed {' and '.join(said)}; in float32 it did not."
