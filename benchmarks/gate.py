"""What the gate costs: from scaled gradients to updated weights, beside what one would use instead.

    python benchmarks/gate.py [--json] [--quick]

Every contender has its own copy of the same variables and reads the same gradients, which its compiled function
captures: passing two hundred tensors from Python takes longer than the update of small ones. The optimizer was built by
the user, before the step is traced, as Keras's guides write it. PyTorch takes part where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import paired
import tensorflow as tf
import torch_gate

import scaler

Shapes = list[tuple[int, ...]]
SIZES: dict[str, Shapes] = {
    "200 x (32, 32)": [(32, 32)] * 200,
    "50 x (256, 256)": [(256, 256)] * 50,
    "4 x (2048, 2048)": [(2048, 2048)] * 4,
    # As many values as BatchNorm's variables, small and large kernels have.
    "a ResNet's variables": [(64,)] * 106 + [(8, 1024)] * 53 + [(512, 512)] * 2,
}
QUICK_SIZES: dict[str, Shapes] = {"5 x (4, 4)": [(4, 4)] * 5}
OPTIMIZERS = {
    "Adam": lambda **arguments: keras.optimizers.Adam(1e-3, **arguments),
    "SGD momentum": lambda **arguments: keras.optimizers.SGD(1e-3, momentum=0.9, **arguments),
}
SCALED = ("Keras LossScaleOptimizer", "Keras LossScaleOptimizer, jit")
PLAIN = ("Keras without scaling", "Keras without scaling, jit")
CASES: dict[str, list[tuple[str, str, float | None]]] = {
    "200 x (32, 32)": [
        ("Adam", "float32", None),
        ("SGD momentum", "float32", 1.0),
        ("SGD momentum", "float16", None),
    ],
    "50 x (256, 256)": [
        ("Adam", "float32", None),
        ("Adam", "float16", 1.0),
        ("SGD momentum", "float16", None),
    ],
    "4 x (2048, 2048)": [
        ("Adam", "float32", None),
        ("Adam", "float16", 1.0),
        ("SGD momentum", "float16", None),
    ],
    "a ResNet's variables": [("Adam", "float32", None)],
    "5 x (4, 4)": [("Adam", "float32", None)],
}
"""What is measured at each size: optimizer, dtype and `clip_norm`. Compiling takes longer than the figures do."""
TARGETS = {
    ("200 x (32, 32)", "Adam, float32"): 0.45,
    ("200 x (32, 32)", "SGD momentum, float32, clipped"): 0.50,
    ("200 x (32, 32)", "SGD momentum, float16 with masters"): 0.50,
    ("50 x (256, 256)", "Adam, float16 with masters, clipped"): 0.70,
    ("50 x (256, 256)", "SGD momentum, float16 with masters"): 0.70,
    ("4 x (2048, 2048)", "Adam, float16 with masters, clipped"): 0.50,
    ("4 x (2048, 2048)", "SGD momentum, float16 with masters"): 0.60,
    ("a ResNet's variables", "Adam, float32"): 0.50,
}
"""To the best of Keras's scalers."""
TO_PLAIN = {("4 x (2048, 2048)", "Adam, float32"): 1.10}
TO_TORCH = {"200 x (32, 32)": 1.3, "50 x (256, 256)": 1.5, "4 x (2048, 2048)": 1.2}
SECONDS = 2.0
"""For each case; compiling takes longer than that."""


def ours(grads: list[tf.Tensor], weights: list[np.ndarray], make_optimizer, clip, jit, select=None):
    own = [tf.Variable(value, dtype=grad.dtype) for value, grad in zip(weights, grads, strict=True)]
    targets = scaler.MasterWeights(own) if grads[0].dtype == tf.float16 else own
    optimizer, loss_scaler = make_optimizer(), scaler.LossScaler(select=select)
    optimizer.build(targets.weights if isinstance(targets, scaler.MasterWeights) else targets)
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


def arrays(shapes: Shapes) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients and weights."""
    rng = np.random.default_rng(0)
    grads, weights = ([rng.standard_normal(shape, np.float32) for shape in shapes] for _ in ("gradients", "weights"))
    return grads, weights


def measure(shapes: Shapes, optimizer: str, dtype: str, clip: float | None, plain: bool, quick: bool) -> paired.Seconds:
    """Times of all contenders, without Keras's unscaled ones where nobody asks for them."""
    values, weights = arrays(shapes)
    grads = [tf.constant(value, dtype) for value in values]
    # Compiling many variables as one takes most of a minute.
    left_out = {"halfstep, jit"} if len(shapes) >= 10 else set()
    if not plain:
        left_out.update(PLAIN)
    if len(set(shapes)) > 1:
        left_out.update(name for name, (_, jit) in CONTENDERS.items() if jit)
    steps = {
        name: make(grads, weights, OPTIMIZERS[optimizer], clip, jit)
        for name, (make, jit) in CONTENDERS.items()
        if name not in left_out
    }
    if (optimizer, dtype) == ("Adam", "float32") and len(set(shapes)) == 1 and torch_gate.installed():
        steps[torch_gate.NAME] = torch_gate.step(values, weights, optimizer, clip)
    return paired.take_turns(steps, SECONDS, quick)


def cases(quick: bool) -> Iterator[tuple]:
    """The name of the sizes, what is done with them, and the times."""
    for name, shapes in (QUICK_SIZES if quick else SIZES).items():
        for optimizer, dtype, clip in CASES[name]:
            what = (
                f"{optimizer}, {'float16 with masters' if dtype == 'float16' else dtype}{', clipped' if clip else ''}"
            )
            plain = (name, what) in TO_PLAIN
            yield name, what, measure(shapes, optimizer, dtype, clip, plain, quick)


def run(quick: bool) -> paired.Report:
    figures, found = [], {}
    for size, what, taken in cases(quick):
        title, scaled = f"{size}, {what}", paired.best(taken, SCALED)
        found[title] = paired.case(taken, scaled)
        figures.append(paired.figure(f"{title}: to {scaled}", taken, "halfstep", scaled, TARGETS.get((size, what))))
        if (size, what) in TO_PLAIN:
            plain = paired.best(taken, PLAIN)
            figures.append(paired.figure(f"{title}: to {plain}", taken, "halfstep", plain, TO_PLAIN[size, what]))
        if torch_gate.NAME in taken:
            name = f"{title}: to {torch_gate.NAME}"
            figures.append(paired.figure(name, taken, "halfstep", torch_gate.NAME, TO_TORCH.get(size)))
        keras.backend.clear_session()
    return paired.Report(figures, found)


if __name__ == "__main__":
    paired.main(__doc__, "gate", run)
