"""What the gate costs: from scaled gradients to updated weights, beside what one would use instead.

    python benchmarks/gate.py [--json] [--quick]

Every contender has its own copy of the same variables and reads the same gradients, which its compiled function
captures: passing two hundred tensors from Python takes longer than the update of small ones. PyTorch takes part where
it is installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import paired
import tensorflow as tf
import torch_gate

import scaler

SIZES = {"200 x (32, 32)": (200, 32), "50 x (256, 256)": (50, 256), "4 x (2048, 2048)": (4, 2048)}
QUICK_SIZES = {"3 x (4, 4)": (3, 4)}
OPTIMIZERS = {
    "Adam": lambda **arguments: keras.optimizers.Adam(1e-3, **arguments),
    "SGD momentum": lambda **arguments: keras.optimizers.SGD(1e-3, momentum=0.9, **arguments),
}
SCALED = ("Keras LossScaleOptimizer", "Keras LossScaleOptimizer, jit")
PLAIN = ("Keras without scaling", "Keras without scaling, jit")
BY_SIZE = {"200 x (32, 32)": 0.50, "50 x (256, 256)": 0.70, "4 x (2048, 2048)": 0.52}
TO_PLAIN = 1.15
SECONDS = 2.0
"""For each case; compiling takes longer than that."""
CASES = [
    ("Adam", "float32", None),
    ("Adam", "float16", 1.0),
    ("SGD momentum", "float32", 1.0),
    ("SGD momentum", "float16", None),
]
"""Half of all combinations, in which each pair of two choices occurs: XLA takes minutes for the others."""


def ours(grads: list[tf.Tensor], weights: list[np.ndarray], make_optimizer, clip, jit) -> Callable[[], tf.Tensor]:
    own = [tf.Variable(value, dtype=grad.dtype) for value, grad in zip(weights, grads, strict=True)]
    targets = scaler.MasterWeights(own) if grads[0].dtype == tf.float16 else own
    optimizer, loss_scaler = make_optimizer(), scaler.LossScaler()
    assert loss_scaler.loss_scale == 2.0**15  # The gradients are as if their loss was scaled by it.
    return tf.function(
        lambda: loss_scaler.apply(optimizer, grads, targets, clip_norm=clip).finite, jit_compile=jit or None
    )


def keras_scaled(grads, weights, make_optimizer, clip, jit):
    return _keras(keras.optimizers.LossScaleOptimizer(make_optimizer(global_clipnorm=clip)), grads, weights, jit)


def keras_plain(grads, weights, make_optimizer, clip, jit):
    return _keras(make_optimizer(global_clipnorm=clip), grads, weights, jit)


def _keras(optimizer, grads, weights, jit):
    own = [tf.Variable(value) for value in weights]
    optimizer.build(own)

    def step():
        optimizer.apply([tf.cast(grad, tf.float32) for grad in grads], own)
        return tf.identity(optimizer.iterations.value)

    return tf.function(step, jit_compile=jit or None)


CONTENDERS = {
    "halfstep": (ours, False),
    "halfstep, jit": (ours, True),
    SCALED[0]: (keras_scaled, False),
    SCALED[1]: (keras_scaled, True),
    PLAIN[0]: (keras_plain, False),
    PLAIN[1]: (keras_plain, True),
}


def arrays(count: int, size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients and weights."""
    rng = np.random.default_rng(0)
    grads, weights = (
        [rng.standard_normal((size, size), np.float32) for _ in range(count)] for _ in ("gradients", "weights")
    )
    return grads, weights


def measure(count: int, size: int, optimizer: str, dtype: str, clip: float | None, quick: bool) -> paired.Seconds:
    values, weights = arrays(count, size)
    grads = [tf.constant(value, dtype) for value in values]
    steps = {
        name: make(grads, weights, OPTIMIZERS[optimizer], clip, jit)
        for name, (make, jit) in CONTENDERS.items()
        # Compiling many variables as one takes most of a minute.
        if name != "halfstep, jit" or count < 10
    }
    if dtype == "float32" and torch_gate.installed():
        steps[torch_gate.NAME] = torch_gate.step(values, weights, optimizer, clip)
    return paired.take_turns(steps, SECONDS, quick)


def cases(quick: bool) -> Iterator[tuple]:
    sizes = QUICK_SIZES if quick else SIZES
    for (name, (count, size)), (optimizer, dtype, clip) in itertools.product(sizes.items(), CASES):
        title = f"{name}, {optimizer}, {'float16 with masters' if dtype == 'float16' else dtype}"
        title += ", clipped" if clip else ""
        yield name, title, measure(count, size, optimizer, dtype, clip, quick)


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    for size, title, taken in cases(quick):
        scaled, plain = paired.best(taken, SCALED), paired.best(taken, PLAIN)
        found[title] = paired.case(taken, scaled)
        figures.append(paired.figure(f"{title}: to {scaled}", taken, "halfstep", scaled, BY_SIZE.get(size)))
        figures.append(paired.figure(f"{title}: to {plain}", taken, "halfstep", plain, TO_PLAIN))
        if torch_gate.NAME in taken:
            figures.append(paired.figure(f"{title}: to {torch_gate.NAME}", taken, "halfstep", torch_gate.NAME))
        keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "gate", run)
