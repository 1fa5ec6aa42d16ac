"""Everything that lint looks at, in the order of its findings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import scaler
from loops.diagnose.graph.calls import LayerCall, Traced, trace
from loops.diagnose.graph.policies import layers_in_float32
from loops.diagnose.graph.restore import kept
from loops.diagnose.lint.arguments import batch_of, built, check_parts, fitting, in_one_sentence, whole
from loops.diagnose.lint.finding import Finding
from loops.diagnose.lint.graph_rules import lost_constants, odd_shapes, rounded_indices
from loops.diagnose.lint.input_range import Seen
from loops.diagnose.lint.layers import cannot_stress, judge, limit_of, unfit_statistics, unfit_weights
from loops.diagnose.lint.losses import half_loss, half_outputs, lost_share
from loops.diagnose.lint.sample import sample_findings
from loops.diagnose.lint.scaling import scaling_findings, scaling_of
from loops.diagnose.lint.stress import CannotStress, Failure, float_inputs, stress

_NOT_STRESSED = (keras.layers.Bidirectional, keras.layers.TimeDistributed, keras.layers.Embedding)


def lint(model: keras.Model, optimizer: Any, loss: Callable, sample: Any) -> list[Finding]:
    """What is known to hurt training in 16 bits, found by running each layer at rising magnitudes.

        for finding in loops.observe.lint(model, optimizer, loss_fn, next(iter(dataset))):
            print(finding.layer, finding.finding, finding.instead)

    Every layer that computes in float16 runs alone, forward and backward, on values of one sign and of both, and beside
    it in float32 on the same values. The model with its loss is traced, in its own dtypes and in float32, for constants
    and for the loss. It also runs on the whole sample, and where something is not finite there, in float32 too.
    Weights, statistics and random generators are afterwards what they were, bit for bit.

    Args:
        model: A Keras model. If it is not built, its first batch builds it.
        optimizer: A Keras optimizer, wrapped or not, or a function of (grads, variables): without a wrapper nothing
            scales the loss. Or the `loops.TrainStep` that holds optimizer and loss scaler.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        sample: A batch `(x, y)` or `(x, y, sample_weight)` of arrays or tensors, or a dataset, whose first batch it is.

    Returns:
        What was found: first what is of the whole set-up, then layer by layer, notes at the end.

    Raises:
        scaler.InvalidArgument: For arguments of the wrong kind.
        BadBatch: For a sample that is empty, or does not fit the model and the loss.
        OutOfData: For a dataset that is empty.
    """
    sample = batch_of(sample)
    check_parts(model, loss, sample)
    scaling = scaling_of(optimizer)
    sample = whole(sample)
    built(model, sample)
    with kept(model):
        seen = Seen(scaler.observe.layers_of(model))
        # Measured in this trace, too, since a function of the model's own is traced once.
        with in_one_sentence(), fitting(model, sample), seen.measuring():
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
            *rounded_indices(traced),
            *_stressed(traced, seen),
            *odd_shapes(traced),
        ]
    return sorted(findings, key=lambda finding: finding.is_note)


def _at(traced: Traced, layer: keras.layers.Layer, finding: Finding) -> Finding:
    return dataclasses.replace(finding, layer=traced.place(layer))


def _constants(model: keras.Model, loss: Callable, sample: tuple, traced: Traced) -> list[Finding]:
    try:
        with layers_in_float32(scaler.observe.layers_of(model)):
            twin = trace(model, loss, sample)
    except (ValueError, TypeError):
        return []  # It casts to float16 by itself; its layers are stressed all the same.
    return lost_constants(traced, twin)


def _stressed(traced: Traced, seen: Seen) -> list[Finding]:
    """Stresses inner layers before those that call them: what fails is said once, where it begins."""
    findings: list[Finding] = []
    known: dict[object, list[Failure] | CannotStress] = {}
    faulty: set[int] = set()
    noted: set[int] = set()
    for call in traced.calls:
        layer = call.layer
        if layer.compute_dtype != "float16" or not float_inputs(call) or _is_container(call) or id(layer) in faulty:
            continue
        inner = {id(one.layer): one.layer for one in traced.calls if any(layer is around for around in one.inside)}
        weighted = sum(bool(one.weights) for one in inner.values())
        key = _alike(call)
        if key not in known:
            known[key] = _failures(call, weighted)
        failed = known[key]
        if isinstance(failed, CannotStress):
            findings.append(_at(traced, layer, cannot_stress(layer, failed)))
            continue
        for found in judge(call, failed, weighted, seen.inputs(layer)):
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
    """Whether it only calls others or looks up, or is called by what runs it step by step and is stressed itself."""
    functional = isinstance(call.layer, keras.Model) and type(call.layer).__module__.startswith("keras.")
    plain = functional or isinstance(call.layer, _NOT_STRESSED)
    return plain or any(isinstance(one, keras.layers.RNN) for one in call.inside)


def _alike(call: LayerCall) -> object:
    """What two calls share that fail alike: class, configuration, shapes, and the size of the weights."""
    try:
        config = {name: value for name, value in call.layer.get_config().items() if name != "name"}
        text = json.dumps(config, sort_keys=True, default=repr)
    except (NotImplementedError, TypeError, ValueError):
        text = str(id(call.layer))
    sizes = tuple(_octaves(variable) for variable in call.layer.weights)
    return type(call.layer), text, repr((call.args, call.kwargs)), sizes


def _octaves(variable: keras.Variable) -> tuple:
    values = np.abs(np.asarray(variable.numpy(), np.float64))
    sizes = [values.max(initial=0.0), np.sqrt(np.mean(np.square(values))) if values.size else 0.0]
    # Sizes of powers of two have Glorot's and He's deviations at whole and half octaves: the steps lie between.
    return tuple(round(float(np.log2(max(size, 1e-30))) + 0.25) if np.isfinite(size) else size for size in sizes)
