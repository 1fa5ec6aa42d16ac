"""Which faults does a loss scaler survive? Halfstep's and Keras's, side by side.

    python benchmarks/faults.py             # one table
    python benchmarks/faults.py --json      # the same for a program
    python benchmarks/faults.py --only clip # faults with this in their name

Each fault is done to both in the same way and the verdict is what was measured afterwards: `survived`, `corrupted` (a
weight, slot or prediction that is not finite), `stuck` (training does not go on), `stretched` (an accumulation window
takes another number of micro-batches), `wrong` (finite, but not the mathematics asked for) or `crashed`. Nothing is
asserted about either.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf

import loops
import scaler


class Verdict(NamedTuple):
    """One word, and what was seen."""

    word: str
    seen: str


class Halfstep:
    """Our scaler around an optimizer."""

    name = "halfstep"

    def __init__(self, optimizer, initial_scale=2.0**15, growth_interval=2000):
        self.optimizer = optimizer
        self.scaler = scaler.LossScaler(scaler.Dynamic(initial_scale, growth_interval=growth_interval))

    def scale(self, loss):
        return self.scaler.scale(loss)

    def snapshot(self, model):
        return scaler.snapshot(model.non_trainable_variables)

    def apply(self, grads, variables, before=None):
        self.scaler.apply(self.optimizer, grads, variables, rollback=before)

    def build(self, variables):
        self.optimizer.build(variables)

    def loss_scale(self):
        return float(self.scaler.loss_scale)


class Keras:
    """`keras.optimizers.LossScaleOptimizer` around an optimizer."""

    name = "keras"

    def __init__(self, optimizer, initial_scale=2.0**15, growth_interval=2000):
        self.optimizer = optimizer
        self.wrapped = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=initial_scale, dynamic_growth_steps=growth_interval
        )

    def scale(self, loss):
        return self.wrapped.scale_loss(loss)

    def snapshot(self, model):
        return None

    def apply(self, grads, variables, before=None):
        self.wrapped.apply(grads, variables)

    def build(self, variables):
        self.wrapped.build(variables)

    def loss_scale(self):
        return float(self.wrapped.dynamic_scale.numpy())


@tf.custom_gradient
def steep(value, factor):
    """`value`, with the factor as its gradient: an infinite one is an overflow of a finite loss."""
    return tf.identity(value), lambda upstream: (upstream * factor, tf.zeros_like(factor))


def descend(side, factors, variable=None, loss=tf.multiply):
    """Minimises w * factor for one factor after another, from w = 1 on: the gradient is the factor."""
    variable = keras.Variable(1.0) if variable is None else variable

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            tape.watch(variable.value)
            scaled = side.scale(loss(tf.convert_to_tensor(variable), factor))
        side.apply(tape.gradient(scaled, [variable.value]), [variable])

    for factor in factors:
        step(tf.constant(factor, tf.float32))
    return variable


def looked_at(**arrays) -> Verdict | None:
    """A verdict if one of the named arrays is not finite."""
    for name, array in arrays.items():
        array = np.asarray(array, np.float64)
        if not np.isfinite(array).all():
            return Verdict("corrupted", f"{name} {'NaN' if np.isnan(array).any() else 'infinite'}")
    return None


def slots(optimizer):
    return np.concatenate([np.ravel(variable.numpy()).astype(np.float64) for variable in optimizer.variables])


@functools.cache
def two_replicas():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def on_replicas(make, values, **arguments):
    """What w = 1 becomes on both replicas when SGD with a learning rate of 1 gets a gradient on each."""
    strategy = two_replicas()
    with strategy.scope():
        variable, side = keras.Variable(1.0), make(keras.optimizers.SGD(1.0, **arguments), initial_scale=1024.0)
        side.build([variable])

    def step(factor):
        with tf.GradientTape() as tape:
            scaled = side.scale(variable * factor)
        side.apply(tape.gradient(scaled, [variable]), [variable])

    @tf.function
    def call():
        shares = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )
        strategy.run(step, args=(shares,))

    call()
    return [float(part) for part in strategy.experimental_local_results(variable.value)]


def overflow_on_a_replica(make, replica) -> Verdict:
    values = [1.0, 1.0]
    values[replica] = float("inf")
    after = on_replicas(make, values)
    return looked_at(weights=after) or Verdict("survived" if after == [1.0, 1.0] else "wrong", f"weights {after}")


def clipping_on_two_replicas(make) -> Verdict:
    """A gradient of 5 on each, clipped to 1, from 1 on: 0. Keras clips on each replica and sums then."""
    (after, _) = on_replicas(make, [5.0, 5.0], global_clipnorm=1.0)
    return Verdict("survived" if abs(after) < 1e-5 else "wrong", f"moved by {1 - after:g}, clipped to 1")


def nonfinite_steps_then_clean(make, loss) -> Verdict:
    side = make(keras.optimizers.SGD(0.01))
    after = float(descend(side, [float("inf")] * 300 + [1.0] * 20, loss=loss).numpy())
    seen = f"scale {side.loss_scale():g}"
    return looked_at(weights=after) or Verdict("stuck" if after == 1.0 else "survived", seen)


def growths_then_normal(make) -> Verdict:
    side = make(keras.optimizers.SGD(0.001), growth_interval=1)
    after = float(descend(side, [0.0] * 300 + [1.0] * 100).numpy())
    seen = f"scale {side.loss_scale():g}"
    return looked_at(weights=after) or Verdict("stuck" if after == 1.0 else "survived", seen)


def forward_overflow_with_batchnorm(make) -> Verdict:
    """In a model under the policy mixed_float16, one batch overflows; then a clean one, and inference."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1, dtype="float32")]
    for layer in layers[:2]:
        layer.dtype_policy = "mixed_float16"
    model = keras.Sequential([keras.Input([4]), *layers])
    side = make(keras.optimizers.Adam(0.01))

    @tf.function
    def step(x):
        before = side.snapshot(model)
        with tf.GradientTape() as tape:
            scaled = side.scale(tf.reduce_mean(tf.square(model(x, training=True))))
        side.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables, before)

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for batch in (x, x * 1e30, x):
        step(tf.constant(batch))
    weights = np.concatenate([np.ravel(variable.numpy()) for variable in model.trainable_variables])
    verdict = looked_at(weights=weights, inference=model(x, training=False).numpy())
    return verdict or Verdict("survived", "inference finite")


def nan_in_the_data_once(make) -> Verdict:
    after = float(descend(make(keras.optimizers.Adam(0.01)), [1.0, float("nan"), 1.0]).numpy())
    return looked_at(weights=after) or Verdict("survived", f"weight {after:g}")


def large_gradients_with_adam(make) -> Verdict:
    """1e20 is finite; its square is not. Ordinary gradients follow."""
    side = make(keras.optimizers.Adam(0.01))
    variable = descend(side, [1.0, 1e20])
    before = float(variable.numpy())
    after = float(descend(side, [1.0] * 5, variable).numpy())
    verdict = looked_at(weights=after, slots=slots(side.optimizer))
    if verdict and after == before:
        return verdict._replace(seen=f"{verdict.seen}, the weight never moves again")
    return verdict or Verdict("survived", f"weight {after:g}")


def repeated_indices_that_overflow(make) -> Verdict:
    """A row looked up twice: two finite gradients of 2e38, infinite when summed."""
    side, table = make(keras.optimizers.SGD(1e-3), initial_scale=1.0), keras.Variable(np.ones([3, 1], np.float32))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value, [1, 1])
            scaled = side.scale(tf.reduce_sum(rows * 1e-38) * 1e38)
        (grad,) = tape.gradient(scaled, [table.value])
        side.apply([tf.IndexedSlices(grad.values * 2e38, grad.indices, grad.dense_shape)], [table])

    step()
    after = table.numpy()
    return looked_at(weights=after) or Verdict("survived" if (after == 1.0).all() else "wrong", f"{after.ravel()}")


def nonfinite_micro_batch(make) -> Verdict:
    """Windows of 4 micro-batches, the second of which is not finite: after which one do the weights move?"""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
    x = [np.full([1, 1], np.inf if number == 1 else 1.0, np.float32) for number in range(12)]
    if make is Halfstep:
        side = make(keras.optimizers.SGD(0.1))
        train = loops.TrainStep(
            model,
            lambda y, prediction: tf.reduce_mean(prediction),
            side.optimizer,
            loss_scaler=side.scaler,
            accumulate=4,
        )
        step = tf.function(lambda x: train((x, x)))
    else:
        side = make(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                scaled = side.scale(tf.reduce_mean(model(x, training=True)))
            side.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    moved, last = [], model.get_weights()[0]
    for number, batch in enumerate(x, 1):
        step(tf.constant(batch))
        now = model.get_weights()[0]
        if not np.array_equal(now, last):
            moved.append(number)
        last = now
    on_time = moved and all(number % 4 == 0 for number in moved)
    verdict = looked_at(weights=last)
    return verdict or Verdict("survived" if on_time else "stretched", f"weights move after {moved} of 12")


FAULTS = {
    "overflow on replica 0 of 2": functools.partial(overflow_on_a_replica, replica=0),
    "overflow on replica 1 of 2": functools.partial(overflow_on_a_replica, replica=1),
    "clipping on 2 replicas": clipping_on_two_replicas,
    "300 overflows, then clean steps": functools.partial(nonfinite_steps_then_clean, loss=steep),
    "300 batches of bad data, then clean ones": functools.partial(nonfinite_steps_then_clean, loss=tf.multiply),
    "300 growths on zero gradients, then normal ones": growths_then_normal,
    "forward overflow with BatchNorm, then inference": forward_overflow_with_batchnorm,
    "NaN in the data once": nan_in_the_data_once,
    "a gradient of 1e20 with Adam": large_gradients_with_adam,
    "repeated indices that overflow when summed": repeated_indices_that_overflow,
    "non-finite micro-batch in a window of 4": nonfinite_micro_batch,
}


def verdict_of(fault, make) -> Verdict:
    """A crash is a verdict, too."""
    try:
        return fault(make)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Verdict("crashed", f"{type(error).__name__}: {lines[-1][:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name")
    options = parser.parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    results = {
        name: {make.name: verdict_of(fault, make) for make in (Halfstep, Keras)}
        for name, fault in FAULTS.items()
        if options.only in name
    }
    if options.json:
        named = {name: {side: seen._asdict() for side, seen in row.items()} for name, row in results.items()}
        print(json.dumps({"keras_version": keras.__version__, "faults": named}, indent=2))
        return
    table = rich.table.Table("fault", "halfstep", f"Keras {keras.__version__} LossScaleOptimizer")
    for name, row in results.items():
        table.add_row(name, *(f"{_coloured(verdict.word)}: {verdict.seen}" for verdict in row.values()))
    rich.console.Console(width=None if rich.console.Console().is_terminal else 130).print(table)


def _coloured(word: str) -> str:
    return f"[{'green' if word == 'survived' else 'red'}]{word}[/]"


if __name__ == "__main__":
    main()
