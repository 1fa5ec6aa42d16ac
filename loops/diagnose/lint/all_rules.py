"""Runs all lint rules, in the order of their findings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import scaler
from loops.diagnose.graph.calls import LayerCall, Traced, trace
from loops.diagnose.graph.changes import restored
from loops.diagnose.graph.models import layers_in_float32
from loops.diagnose.lint.arguments import (
    as_tensors,
    batch_of,
    build,
    check_arguments,
    explaining_misfit,
    in_one_sentence,
)
from loops.diagnose.lint.finding import Finding
from loops.diagnose.lint.graph_rules import lost_constants, narrow_statistics, odd_shapes, rounded_indices
from loops.diagnose.lint.input_range import InputRanges
from loops.diagnose.lint.layers import cannot_stress, findings_under_stress, limit_of, unfit_statistics, unfit_weights
from loops.diagnose.lint.losses import half_loss, half_outputs, lost_share
from loops.diagnose.lint.narrow_format import format_findings
from loops.diagnose.lint.sample import sample_findings
from loops.diagnose.lint.scaling import scaling_findings, scaling_of
from loops.diagnose.lint.stress import CannotStress, Failure, float_inputs, stress
from loops.diagnose.lint.xla import not_compiled

_NOT_STRESSED = (keras.layers.Bidirectional, keras.layers.TimeDistributed, keras.layers.Embedding)


def lint(
    model: keras.Model, optimizer: Any, loss: Callable, sample: Any, *, xla: bool = False, format: str | None = None
) -> list[Finding]:
    """Finds what is known to hurt training in 16 bits, by running each layer at rising magnitudes.

        for finding in loops.observe.lint(model, optimizer, loss_fn, next(iter(dataset))):
            print(finding.layer, finding.finding, finding.instead)

    Every layer that computes in float16 runs alone, forward and backward, on values of one sign and of both signs, and
    again in float32 on the same values. The model and its loss are traced in their own dtypes and in float32, to check
    constants and the loss. The model also runs on the whole sample; if something is not finite there, it runs again in
    float32. Weights, statistics and random generators are restored bit for bit.

    Args:
        model: A Keras model. If it is not built, the sample builds it.
        optimizer: A Keras optimizer, wrapped or not, or a function of (grads, variables): without a wrapper nothing
            scales the loss. Or the `loops.TrainStep` that holds optimizer and loss scaler.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        sample: A batch `(x, y)` or `(x, y, sample_weight)` of arrays or tensors, or a dataset, whose first batch is
            used.
        xla: Whether each layer is also compiled by XLA, forward and backward, in its own dtype, to name those that it
            refuses. It takes about a second for a layer.
        format: A format of `scaler.formats.emulated`, to name the layers that cannot be in it: their rounding alone
            moves the gradients by more than the noise of the batch does, or by half of their norm. The model then also
            runs on each half of the sample.

    Returns:
        The findings: those about the whole set-up first, then layer by layer, with notes at the end.

    Raises:
        scaler.InvalidArgument: For arguments of the wrong kind.
        BadBatch: For a sample that is empty, or does not fit the model and the loss.
        OutOfData: For an empty dataset.
    """
    if format is not None:
        scaler.formats.emulated(format)
    sample = batch_of(sample)
    check_arguments(model, loss, sample)
    scaling = scaling_of(optimizer)
    sample = as_tensors(sample)
    build(model, sample)
    with restored(model):
        seen = InputRanges(scaler.observe.layers_of(model))
        # This trace is measured too, since a `tf.function` inside the model is traced only once.
        with in_one_sentence(), explaining_misfit(model, sample), seen.measuring():
            traced = trace(model, loss, sample)
        called = traced.layers
        with in_one_sentence():
            on_sample = sample_findings(traced, model, loss, sample, seen)
        findings = [
            *on_sample,
            *scaling_findings(model, called, scaling, lambda: lost_share(model, loss, sample)),
            *half_loss(traced, loss, sample),
            *half_outputs(traced, model.name),
            *_constants(model, loss, sample, traced),
            *(_at(traced, layer, found) for layer in called for found in unfit_weights(layer)),
            *(_at(traced, layer, found) for layer in called for found in unfit_statistics(layer)),
            *narrow_statistics(traced),
            *rounded_indices(traced),
            *_stressed(traced, seen),
            *odd_shapes(traced),
            *(not_compiled(traced) if xla else []),
            *(format_findings(format, traced, model, loss, sample) if format is not None else []),
        ]
    return sorted(findings, key=lambda finding: finding.is_note)


def _at(traced: Traced, layer: keras.layers.Layer, finding: Finding) -> Finding:
    return dataclasses.replace(finding, layer=traced.place(layer))


def _constants(model: keras.Model, loss: Callable, sample: tuple, traced: Traced) -> list[Finding]:
    try:
        with layers_in_float32(scaler.observe.layers_of(model)):
            twin = trace(model, loss, sample)
    except (ValueError, TypeError):
        return []  # The model casts to float16 by itself; its layers are stressed all the same.
    return lost_constants(traced, twin)


def _stressed(traced: Traced, seen: InputRanges) -> list[Finding]:
    """Stresses inner layers before those that call them, and reports a failure once, where it begins."""
    findings: list[Finding] = []
    known: dict[object, list[Failure] | CannotStress] = {}
    faulty: set[int] = set()
    noted: set[int] = set()
    for call in traced.calls:
        layer = call.layer
        if layer.compute_dtype != "float16" or not float_inputs(call) or _is_container(call) or id(layer) in faulty:
            continue
        weighted = sum(bool(one.weights) for one in traced.inside(layer))
        key = _shared_key(call)
        if key not in known:
            known[key] = _failures(call, weighted)
        failed = known[key]
        if isinstance(failed, CannotStress):
            findings.append(_at(traced, layer, cannot_stress(layer, failed)))
            continue
        for found in findings_under_stress(call, failed, weighted, seen.inputs(layer)):
            around = {id(one) for one in (layer, *call.inside)}
            if not found.is_note:
                faulty |= around
            elif id(layer) in noted:
                continue
            noted |= around
            findings.append(_at(traced, layer, found))
    return findings


def _failures(call: LayerCall, weighted_inside: int) -> list[Failure] | CannotStress:
    try:
        return stress(call, limit_of(weighted_inside))
    except CannotStress as error:
        return error


def _is_container(call: LayerCall) -> bool:
    """Whether a layer only calls others or looks up rows, or belongs to a recurrent layer that is stressed itself."""
    functional = isinstance(call.layer, keras.Model) and type(call.layer).__module__.startswith("keras.")
    plain = functional or isinstance(call.layer, _NOT_STRESSED)
    return plain or any(isinstance(one, keras.layers.RNN) for one in call.inside)


def _shared_key(call: LayerCall) -> object:
    """A key that is equal for calls that fail in the same way: class, configuration, shapes, sizes of the weights."""
    try:
        config = {name: value for name, value in call.layer.get_config().items() if name != "name"}
        text = json.dumps(config, sort_keys=True, default=repr)
    except (NotImplementedError, TypeError, ValueError):
        text = str(id(call.layer))
    sizes = tuple(_octaves(variable) for variable in call.layer.weights)
    return type(call.layer), text, repr(call.signature), sizes


def _octaves(variable: keras.Variable) -> tuple:
    values = np.abs(np.asarray(variable.numpy(), np.float64))
    sizes = [values.max(initial=0.0), np.sqrt(np.mean(np.square(values))) if values.size else 0.0]
    # For layer widths of powers of two, Glorot's and He's deviations are at whole and half powers of two.
    # The offset keeps them away from the rounding boundaries.
    return tuple(round(float(np.log2(max(size, 1e-30))) + 0.25) if np.isfinite(size) else size for size in sizes)
