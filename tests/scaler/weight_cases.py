"""The README's five-line step in mixed_float16, and what its graph and XLA's program hold: also for a benchmark."""

import re

import keras
import numpy as np
import tensorflow as tf

import loops
import scaler

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH = (np.random.default_rng(0).standard_normal((64, 64), np.float32), np.arange(64, dtype=np.int32) % 10)


def three_layers():
    """Their weights are float32 already, so the step has no masters."""
    wide = [keras.layers.Dense(128, "relu", dtype="mixed_float16") for _ in range(2)]
    return keras.Sequential([keras.Input([64]), *wide, keras.layers.Dense(10, dtype="float32")])


def by_hand():
    model, optimizer, loss_scaler = three_layers(), keras.optimizers.Adam(1e-4), scaler.LossScaler(scaler.Dynamic())
    x, y = map(tf.constant, BATCH)

    def step():
        before = scaler.snapshot(model.non_trainable_variables)
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        loss_scaler.apply(optimizer, grads, model.trainable_variables, rollback=before)
        return loss

    return step


def train_step(select=None):
    loss_scaler = scaler.LossScaler(scaler.Dynamic(), select=select)
    step = loops.TrainStep(three_layers(), LOSS, keras.optimizers.Adam(1e-4), loss_scaler=loss_scaler)
    x, y = map(tf.constant, BATCH)
    return lambda: step((x, y))["loss"]


def selecting():
    return train_step(select=True)


def all_operations(graph):
    """The types of those of every branch and every function, compiled ones included."""
    definition = graph.as_graph_def()
    yield from (node.op for node in definition.node)
    yield from (node.op for function in definition.library.function for node in function.node_def)


def program(compiled):
    """How many parameters, fusions and conditionals XLA's program of a function without arguments has."""
    text = compiled.experimental_get_compiler_ir()(stage="optimized_hlo")
    entry = text[text.index("\nENTRY ") :]
    return {
        "parameters": len(re.findall(r" parameter\(", entry)),
        "fusions": len(re.findall(r" fusion\(", text)),
        "conditionals": len(re.findall(r" conditional\(", text)),
    }
