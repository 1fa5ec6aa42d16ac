"""Which layers could compute in a narrower format: a layer's rounding against the noise of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.calls import Traced, loss_of
from loops.diagnose.graph.changes import restored
from loops.diagnose.graph.models import layers_in_float32
from loops.diagnose.lint.finding import Finding, Kind, note
from loops.support.batches import parts

MOST = 0.5
"""The largest error over the norm, whatever the noise: beyond it the gradients point elsewhere."""


def errors_in(format: scaler.formats.Emulated, model: keras.Model, loss: Callable, sample: Any) -> list[tuple]:
    """What rounding one layer's products alone does to the gradients of all weights.

    Every layer computes in float32. The sample is run whole, and in two halves: half the distance between their
    gradients is how far the gradient of such a batch lies from that of the data, about.

    Args:
        format: The format. Delayed scaling is measured as current scaling, since there are no past steps.
        model: The model.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight).
        sample: A batch of at least two examples.

    Returns:
        A tuple of layer, its error and the noise, both over the norm of the gradients, for each layer that can be
        emulated.
    """
    x, y, weight = parts(sample, "lint")
    size = int(tf.nest.flatten(x)[0].shape[0])

    def gradients(first: int = 0, last: int = size) -> np.ndarray:
        part_x, part_y, part_weight = tf.nest.map_structure(
            lambda values: None if values is None else values[first:last], (x, y, weight)
        )
        with restored(model), tf.GradientTape() as tape:
            value = tf.cast(loss_of(loss, model(part_x, training=True), part_y, part_weight), tf.float32)
        weights = model.trainable_variables
        found = scaler.gradients.derivatives(tape.gradient(value, weights), weights)
        wide = [tf.cast(tf.convert_to_tensor(one), tf.float32) for one in found if one is not None]
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


def format_findings(format: str, traced: Traced, model: keras.Model, loss: Callable, sample: Any) -> list[Finding]:
    """A finding for each layer whose rounding is above the noise, and a note about the others."""
    emulated = scaler.formats.emulated(format)
    if int(tf.nest.flatten(sample)[0].shape[0]) < 2 or not emulated.layers_of(model):
        return []
    measured = errors_in(emulated, model, loss, sample)
    fit = [(layer, error, noise) for layer, error, noise in measured if error <= min(noise, MOST)]
    # What is NaN is none of these.
    unfit = [one for one in measured if one not in fit]
    findings = [
        Finding(
            traced.place(layer),
            f"{format} moves the gradients too far: by more than the noise of the batch, or by half of their norm.",
            f"With the products of this layer alone in {format}, they move by {error:.1%} of their norm; those of the "
            f"two halves of the sample lie {noise:.1%} from their mean.",
            f"Leave this layer as it is: hs.formats.emulated({format!r})(model, only=[...]) takes the others.",
            Kind.FORMAT,
        )
        for layer, error, noise in unfit
    ]
    return [*findings, *_fitting(format, [(traced.place(layer), error, noise) for layer, error, noise in fit])]


def _fitting(format: str, fit: Sequence[tuple[str, float, float]]) -> list[Finding]:
    if not fit:
        return []
    listed = ", ".join(f"{name} {error:.1%}" for name, error, _ in fit)
    return [
        note(
            None,
            f"in {format} these layers move the gradients by less than the noise of the batch does.",
            f"{listed}, each alone; the noise is {fit[0][2]:.1%}.",
            "Nothing. To train in it: hs.formats.emulated, see docs/formats.md.",
            Kind.FORMAT,
        )
    ]
