"""What float16 makes zero of a deep network's gradients, by layer: the best single scale against Layerwise.

    python benchmarks/layerwise.py [--depth 20] [--steps 40] [--json]

A float16 network of sigmoid layers on the digits, whose gradients shrink by each layer. The weights stay as they were
initialized, so that all set-ups meet the same gradients. A single scale is chosen with hindsight: the largest power of
two at which no step overflows. Layerwise starts at 1 and is counted in the second half of the steps. Flushed is the
share of elements of a layer's kernel gradient that are zero in float16 and are not in float32, of the same weights.
"""

from __future__ import annotations

import argparse
import json

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf

import scaler
from loops.tasks import load


def network(depth: int, dtype: str) -> keras.Model:
    """Sigmoid layers, the same float16 numbers as weights in either dtype."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input([64], dtype=dtype)
    for number in range(1, depth + 1):
        x = keras.layers.Dense(64, activation="sigmoid", dtype=dtype, name=f"layer_{number}")(x)
    model = keras.Model(inputs, keras.layers.Dense(10, dtype=dtype, name="logits")(x))
    model.set_weights([np.float16(value) for value in model.get_weights()])
    return model


def kernels(model: keras.Model) -> list:
    return [variable for variable in model.trainable_variables if variable.name == "kernel"]


def loss_of(model: keras.Model, images, labels) -> tf.Tensor:
    logits = tf.cast(model(tf.reshape(images, [len(images), 64])), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits))


def plain(model: keras.Model):
    """A function from a batch and a scale to scaled gradients of the kernels."""

    @tf.function
    def gradients(images, labels, loss_scale):
        with tf.GradientTape() as tape:
            scaled = loss_of(model, images, labels) * loss_scale
        return tape.gradient(scaled, kernels(model))

    return gradients


def layerwise(model: keras.Model, depth: int):
    """A function from a batch to gradients of the kernels and whether the step was finite."""
    rescaled, scales = scaler.layerwise.insert_rescales(model, [f"layer_{number}" for number in range(1, depth + 1)])

    @tf.function
    def gradients(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(rescaled, images, labels)
        grads, seen = scales.gradient(tape, loss, kernels(model))
        scales.update(seen)
        return grads, scaler.all_finite(grads)

    return gradients, scales


def flushed(grads, reference) -> np.ndarray:
    """By kernel."""
    return np.array([np.mean((g.numpy() == 0) & (r.numpy() != 0)) for g, r in zip(grads, reference, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    batches = [batch for batch, _ in zip(load("digits").dataset(64, 0), range(options.steps), strict=False)]
    counted = batches[len(batches) // 2 :]

    exact = plain(network(options.depth, "float32"))
    references = [exact(*batch, tf.constant(1.0)) for batch in counted]
    narrow = network(options.depth, "float16")
    single = plain(narrow)
    exponent = 40
    while not all(bool(scaler.all_finite(single(*batch, tf.constant(2.0**exponent)))) for batch in batches):
        exponent -= 1
    run, scales = layerwise(narrow, options.depth)
    seen = [run(*batch) for batch in batches]
    ours = [grads for grads, _ in seen[len(batches) // 2 :]]
    bests = [single(*batch, tf.constant(2.0**exponent)) for batch in counted]
    ones = [single(*batch, tf.constant(1.0)) for batch in counted]
    shares = {
        name: np.mean([flushed(g, r) for g, r in zip(found, references, strict=True)], axis=0).tolist()
        for name, found in (("no scale", ones), ("best single scale", bests), ("Layerwise", ours))
    }
    found = {
        "layers": [variable.path.split("/")[0] for variable in kernels(narrow)],
        "log2_gradient": np.mean([[np.log2(np.abs(g.numpy()).max()) for g in r] for r in references], axis=0).tolist(),
        "single_log2_scale": exponent,
        "layerwise_log2_scales": dict(zip(scales.names, np.log2(scales.scales.numpy()).tolist(), strict=True)),
        "layerwise_skipped": sum(not bool(finite) for _, finite in seen),
        "flushed": shares,
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    own = found["layerwise_log2_scales"]
    table = rich.table.Table(
        "layer", "log2 of the largest gradient", "log2 of its scale", *(f"{n}: zero" for n in shares)
    )
    for row, layer in enumerate(found["layers"]):
        table.add_row(
            layer,
            f"{found['log2_gradient'][row]:.1f}",
            f"{own.get(layer, own['outputs']):.0f}",
            *(f"{100 * share[row]:.2f} %" for share in shares.values()),
        )
    rich.console.Console().print(table)
    print(
        f"best single scale: 2^{exponent}; steps skipped by Layerwise: {found['layerwise_skipped']} of {len(batches)}"
    )


if __name__ == "__main__":
    main()
