"""What it costs to look at an update before it counts, where nothing is proven of the optimizer.

    python benchmarks/transaction.py [--json] [--quick]

The same gate with the same optimizer, which is looked at, and which is taken as if it were proven.
"""

from __future__ import annotations

import unittest.mock

import gate
import keras
import paired
import tensorflow as tf

import scaler

OPTIMIZERS = {
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-3),
    "RMSprop centered": lambda: keras.optimizers.RMSprop(1e-3, centered=True),
}
SECONDS = 4.0


def step(grads, weights, make_optimizer, *, proven: bool):
    variables = [tf.Variable(value) for value in weights]
    optimizer, loss_scaler = make_optimizer(), scaler.LossScaler()
    assert loss_scaler.loss_scale == 2.0**15  # The gradients are as if their loss was scaled by it.
    run = tf.function(lambda: loss_scaler.apply(optimizer, grads, variables).finite)
    bound = unittest.mock.patch("scaler.gate.proofs.largest_learning_rate", return_value=float("inf"))
    if proven:
        with bound:
            run()
    else:
        run()
    return run


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    for size, shapes in (gate.QUICK_SIZES if quick else gate.SIZES).items():
        values, weights = gate.arrays(shapes)
        grads = [tf.constant(value) for value in values]
        for name, make in OPTIMIZERS.items():
            steps = {
                "looked at": step(grads, weights, make, proven=False),
                "as if proven": step(grads, weights, make, proven=True),
            }
            taken = paired.take_turns(steps, SECONDS, quick)
            found[f"{size}, {name}"] = paired.case(taken, "as if proven")
            figures.append(paired.figure(f"{size}, {name}: to no look", taken, "looked at", "as if proven"))
            keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "transaction", run)
