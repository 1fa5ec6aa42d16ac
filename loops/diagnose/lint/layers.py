"""From what failed under stress to a finding, and how far a layer is stressed at all."""

from __future__ import annotations

import keras
import numpy as np

import scaler
from loops.diagnose.graph.calls import LayerCall
from loops.diagnose.lint.finding import Finding, Kind, note
from loops.diagnose.lint.input_range import Inputs
from loops.diagnose.lint.stress import CannotStress, Failure, float_inputs

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


def judge(call: LayerCall, failures: list[Failure], weighted_inside: int, seen: Inputs | None) -> list[Finding]:
    """Says what failed under stress; a list of one finding or none.

    Args:
        call: Of the layer.
        failures: What `stress` found.
        weighted_inside: How many layers with weights it calls.
        seen: What the layer is given on the sample, None if that is not known. What needs larger inputs is a note.
    """
    faults = [failure for failure in failures if failure.kind != "large"]
    # Of several inputs the true output may be their product, which no layer can help.
    if not faults and (weighted_inside or float_inputs(call) != 1):
        return []
    found = faults or failures
    reached = [one for one in found if seen is None or seen.reach(one.magnitude, one.one_signed)]
    if reached:
        return [_fault(call.layer, faults) if faults else _too_large(call.layer, reached[0])]
    if not found or seen is None:
        return []
    larger = " on inputs larger than your sample's"
    finding = _fault(call.layer, faults, larger) if faults else _too_large(call.layer, found[0])
    return [
        note(
            finding.layer,
            finding.finding,
            f"{finding.measured} On your sample its inputs reach {seen.amax:.3g}.",
            f"Nothing, as long as its inputs stay like these. Else: {finding.instead[0].lower()}{finding.instead[1:]}",
            finding.kind,
        )
    ]


def cannot_stress(layer: keras.layers.Layer, error: CannotStress) -> Finding:
    """Of a layer that does not run by itself."""
    return note(
        layer.name,
        "this layer could not be stressed, so nothing is known of it.",
        f"Run alone it raised {error}",
        "Look at its limits in float16 yourself, or give it dtype='float32'.",
        Kind.NOT_STRESSED,
    )


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
                    Kind.WEIGHTS,
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
            Kind.STATISTICS,
        )
    ]


def _fault(layer: keras.layers.Layer, faults: list[Failure], where: str = "") -> Finding:
    kind = type(layer).__name__
    backward = all(failure.backward for failure in faults)
    spoilt = f"{'its gradient' if backward else 'its output'} is {_kinds(faults)}"
    return Finding(
        layer.name,
        f"{kind} fails in float16{where}: {spoilt} where float32 is finite and float16 could hold it.",
        _ranges(faults),
        f"Give this layer dtype='float32': keras.layers.{kind}(..., dtype='float32')."
        if type(layer).__module__.startswith("keras.")
        else f"Give this layer dtype='float32': {kind}(..., dtype='float32').",
        Kind.FAILS_UNDER_STRESS,
    )


def _too_large(layer: keras.layers.Layer, failure: Failure) -> Finding:
    ratio = failure.reference / failure.magnitude if failure.magnitude else float("inf")
    return Finding(
        layer.name,
        f"{type(layer).__name__} enlarges its input {ratio:.3g} times, and overflows in float16 early.",
        f"At inputs of {failure.magnitude:g} the output is {failure.reference:.3g} in float32; float16 ends at 65504. "
        "Layers with Glorot, He or orthogonal kernels stay below 7 times.",
        "Take a mean in the place of a sum, use smaller weights, or give this layer dtype='float32'.",
        Kind.ENLARGES,
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
