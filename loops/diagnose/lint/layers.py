"""Turns failures under stress into findings, checks a layer's weights, and limits how far it is stressed."""

from __future__ import annotations

import keras
import numpy as np

import scaler
from loops.diagnose.graph.calls import LayerCall
from loops.diagnose.lint.finding import Finding, Kind, note
from loops.diagnose.lint.input_range import Inputs
from loops.diagnose.lint.stress import CannotStress, Failure, float_inputs

_ALONE, _SEVERAL, _MANY = 5e3, 1e3, 10.0
"""The largest input for a layer without inner weighted layers, for one with some, and for one with many."""
_FEW_LAYERS = 8
_WORDS = (("nan", "NaN"), ("inf", "infinite"), ("zero", "all zeros"))
_LARGEST = scaler.float_format("float16").max


def limit_of(weighted_inside: int) -> float:
    """The largest magnitude at which a layer is stressed.

    An ordinary layer's output is at most 7 times its input, so inputs above 5e3 may overflow without a fault of the
    layer. In a layer that calls others these factors multiply.

    Args:
        weighted_inside: The number of layers with weights that it calls.
    """
    if not weighted_inside:
        return _ALONE
    return _SEVERAL if weighted_inside <= _FEW_LAYERS else _MANY


def findings_under_stress(
    call: LayerCall, failures: list[Failure], weighted_inside: int, seen: Inputs | None
) -> list[Finding]:
    """The finding for a layer's failures under stress: a list of one, or empty.

    Args:
        call: A call of the layer.
        failures: The failures that `stress` found.
        weighted_inside: The number of layers with weights that it calls.
        seen: The layer's inputs on the sample, or None if unknown. A failure on far larger inputs becomes a note.
    """
    faults = [failure for failure in failures if failure.kind != "large"]
    # With several inputs the true output may be their product, and an overflow is then not the layer's fault.
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
            "Nothing, as long as its inputs stay in this range. Otherwise "
            f"{finding.instead[0].lower()}{finding.instead[1:]}",
            finding.kind,
        )
    ]


def cannot_stress(layer: keras.layers.Layer, error: CannotStress) -> Finding:
    """A note for a layer that does not run alone."""
    return note(
        layer.name,
        "this layer could not be stressed, so its behaviour in float16 is unknown.",
        f"Run alone, it raised {error}",
        "Check its limits in float16 yourself, or give it dtype='float32'.",
        Kind.NOT_STRESSED,
    )


def unfit_weights(layer: keras.layers.Layer) -> list[Finding]:
    """A finding if a weight of the layer itself exceeds the range of float16."""
    if layer.compute_dtype != "float16":
        return []
    inner = {id(variable) for one in scaler.observe.layers_of(layer)[1:] for variable in one.weights}
    for variable in layer.trainable_variables:
        amax = float(np.max(np.abs(np.asarray(variable.numpy(), np.float32)), initial=0.0))
        if id(variable) not in inner and not amax <= _LARGEST:
            return [
                Finding(
                    layer.name,
                    "a weight is too large for float16, the layer's compute dtype.",
                    f"The largest magnitude of {variable.path} is {amax:g}; float16 ends at 65504.",
                    "Find out why it grew (learning rate, missing weight decay), or give this layer dtype='float32'.",
                    Kind.WEIGHTS,
                )
            ]
    return []


def unfit_statistics(layer: keras.layers.Layer) -> list[Finding]:
    """A finding if the mean or variance of a Normalization, which it holds in its compute dtype, is infinite."""
    if not isinstance(layer, keras.layers.Normalization) or layer.compute_dtype != "float16":
        return []
    held = {"mean": layer.mean, "variance": layer.variance}
    beyond = [name for name, value in held.items() if value is not None and not np.all(np.isfinite(np.asarray(value)))]
    if not beyond:
        return []
    return [
        Finding(
            layer.name,
            f"the {beyond[0]} with which it normalises is too large for float16.",
            f"{layer.name}.{beyond[0]} is infinite; float16 ends at 65504.",
            "Give this layer dtype='float32' and adapt it again: keras.layers.Normalization(..., dtype='float32').",
            Kind.STATISTICS,
        )
    ]


def _fault(layer: keras.layers.Layer, faults: list[Failure], where: str = "") -> Finding:
    kind = type(layer).__name__
    backward = all(failure.backward for failure in faults)
    spoilt = f"{'its gradient' if backward else 'its output'} is {_kinds(faults)}"
    return Finding(
        layer.name,
        f"{kind} fails in float16{where}: {spoilt} where the float32 result is finite and within float16's range.",
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
        f"{type(layer).__name__} enlarges its input {ratio:.3g} times, so it overflows early in float16.",
        f"At inputs of {failure.magnitude:g} the output is {failure.reference:.3g} in float32; float16 ends at 65504. "
        "Layers with Glorot, He or orthogonal kernels stay below 7 times.",
        "Use a mean instead of a sum, use smaller weights, or give this layer dtype='float32'.",
        Kind.ENLARGES,
    )


def _kinds(faults: list[Failure]) -> str:
    kinds = {failure.kind for failure in faults}
    return " or ".join(text for kind, text in _WORDS if kind in kinds)


def _ranges(faults: list[Failure]) -> str:
    """The input magnitudes that failed, for each pass, as a sentence."""
    passes = []
    for backward, name in ((False, "forward"), (True, "backward")):
        at = sorted({failure.magnitude for failure in faults if failure.backward == backward})
        if at:
            passes.append(f"{name} with inputs of magnitude {', '.join(f'{one:g}' for one in at)}")
    return f"Run alone, it failed {' and '.join(passes)}; in float32 it did not."
