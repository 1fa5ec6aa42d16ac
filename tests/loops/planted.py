"""Small programs, each with one thing wrong, as `--build planted:NAME` takes them."""

import functools
import pathlib

import keras
import numpy as np
import tensorflow as tf
from mirrored import mirrored
from models import squared_error as squares

import loops
import scaler

STEPS = {}
"""How many steps each takes."""


def program(steps):
    """Names a function that gives a model, or it and what else is unusual, and makes it one that gives the loop."""

    def of(function):
        STEPS[function.__name__] = steps

        @functools.wraps(function)
        def build(run: pathlib.Path) -> loops.Loop:
            keras.utils.set_random_seed(1)
            made = function()
            model, unusual = made if isinstance(made, tuple) else (made, {})
            usual = {"loss": squares, "x": inputs(16, 8), "y": inputs(16, 1), "strategy": scaler.Dynamic(2.0**10)}
            usual["optimizer"] = keras.optimizers.SGD(0.01)
            return loop_of_model(model, run, **{**usual, **unusual})

        # Whoever asks for its arguments is to be told its own.
        del build.__wrapped__
        return build

    return of


def loop_of_model(model, run, loss, x, y, strategy, optimizer, **options):
    step = loops.TrainStep(model, loss, optimizer, loss_scaler=scaler.LossScaler(strategy), **options)
    return loop_of(step, x, y, run)


def loop_of(step, x, y, run, **options):
    return loops.Loop(
        step,
        tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True).repeat(),
        actions=[loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)],
        jit_compile=False,  # XLA keeps more than 16 bits between operations, so that some of these would be finite.
        **options,
    )


def inputs(*shape):
    return np.random.RandomState(0).normal(size=shape).astype(np.float32)


def inputs_with(value, *places, count=16):
    """The usual inputs with a value in some places: indices of an example, a column, or both."""
    x = inputs(count, 8)
    for place in places:
        x[place] = value
    return x


def dense(*layers, width=8):
    return keras.Sequential([keras.Input((width,)), *layers])


def plain(units, name, **options):
    return keras.layers.Dense(units, name=name, dtype="mixed_float16", **options)


def two(between=None, **options):
    """Two layers, with options of the first, and perhaps one between them."""
    return dense(*filter(None, (plain(8, "first", **options), between, plain(1, "out"))))


@program(6)
def large_weights():
    """A layer whose weights are 1e4."""
    big = plain(8, "big", kernel_initializer=keras.initializers.Constant(1e4))
    return two(big, kernel_initializer="ones"), {"x": np.abs(inputs(16, 8)) + 1}


@program(8)
def learning_rate():
    """A learning rate that is too large."""
    return two(activation="relu"), {"optimizer": keras.optimizers.SGD(60.0)}


@program(8)
def weight_decay():
    """A weight decay of the wrong sign, which makes the weights ten times as large at each step."""
    return two(), {"optimizer": keras.optimizers.SGD(1e-6, weight_decay=-9e6)}


@program(5)
def nan_batch():
    """NaN in one batch."""
    return two(), {"x": inputs_with(np.nan, (9, 3))}


@program(12)
def nan_batch_then_overflow():
    """NaN in the third batch, and from the next on inputs whose exponentials float16 does not hold."""
    x = inputs(64, 8) * 0.1
    x[9, 3] = np.nan
    x[12:] *= 400
    exponential = keras.layers.Lambda(keras.ops.exp, name="exponential", dtype="mixed_float16")
    return two(exponential, activation="relu"), {"x": x, "y": inputs(64, 1)}


@program(24)
def flushed():
    """A loss of a tiny weight, the gradients of which float16 does not hold at a scale of 1."""
    model = dense(plain(8, "first"), plain(8, "second"), plain(1, "out"))
    return model, {"loss": lambda y, p: 1e-9 * squares(y, p), "strategy": scaler.Static(1.0)}


@program(24)
def clipped_loss():
    """A loss that is clipped, so that it does not depend on the weights."""
    return two(), {"loss": lambda y, p: tf.maximum(squares(y, p), 1e3)}


@program(4)
def high_floor():
    """A scale with too high a floor."""
    strategy = scaler.Dynamic(initial_scale=2.0**24, min_scale=2.0**22, max_scale=2.0**24)
    return two(), {"y": inputs(16, 1) + 3, "strategy": strategy}


class Norm(keras.layers.Layer):
    """x / sqrt(mean(x^2) + epsilon), with an epsilon that float16 does not hold."""

    def __init__(self, epsilon, **options):
        super().__init__(**options)
        self.epsilon = epsilon

    def call(self, x):
        return x / keras.ops.sqrt(keras.ops.mean(x * x, axis=-1, keepdims=True) + self.epsilon)


@program(3)
def small_epsilon():
    """Epsilon 1e-8 in float16."""
    return dense(Norm(1e-8, name="norm", dtype="mixed_float16"), plain(1, "out")), {"x": inputs_with(0.0, 5)}


class Masked(keras.layers.Layer):
    """Softmax of scores, a row of which is masked whole."""

    def __init__(self, mask_value, **options):
        super().__init__(**options)
        self.mask_value = mask_value

    def call(self, x):
        keep = keras.ops.cast(x > 0.0, x.dtype)
        return keras.ops.softmax(x + (1.0 - keep) * self.mask_value)


@program(3)
def attention_mask():
    """A mask of -1e9."""
    return dense(Masked(-1e9, name="masked", dtype="mixed_float16"), plain(1, "out")), {"x": inputs_with(-1.0, 5)}


class MaskedByLiteral(keras.layers.Layer):
    """The same with the number in the call."""

    def call(self, x):
        keep = keras.ops.cast(x > 0.0, x.dtype)
        return keras.ops.softmax(x + (1.0 - keep) * -1e9)


@program(3)
def literal_mask():
    """A mask of -1e9 that no attribute holds."""
    return dense(MaskedByLiteral(name="masked", dtype="mixed_float16"), plain(1, "out")), {"x": inputs_with(-1.0, 5)}


class NormByLiteral(keras.layers.Layer):
    """Divides by a norm and an epsilon that float16 does not hold."""

    def call(self, x):
        return x / (keras.ops.norm(x, axis=-1, keepdims=True) + 1e-12)


@program(3)
def literal_epsilon():
    """An epsilon of 1e-12 that no attribute holds."""
    return dense(NormByLiteral(name="norm", dtype="mixed_float16"), plain(1, "out")), {"x": inputs_with(0.0, 5)}


class Root(keras.layers.Layer):
    """A square root that meets 0."""

    def call(self, x):
        return keras.ops.sqrt(keras.ops.relu(x))


@program(3)
def root_at_zero():
    """A square root at 0."""
    return two(Root(name="root", dtype="mixed_float16"))


@program(2)
def root_under_an_overflow():
    """The same in a step whose scale is too high as well: it hides the root, and no lower one helps."""
    first = keras.layers.Dense(8, dtype="float16", name="first")
    model = dense(first, Root(name="root", dtype="mixed_float16"), plain(1, "out"))
    return model, {"loss": lambda y, prediction: 1e3 * squares(y, prediction)}


class SmallRoot(keras.layers.Layer):
    """A square root with an epsilon that float16 does not hold."""

    def call(self, x):
        return keras.ops.sqrt(keras.ops.relu(x) + 1e-8)


def narrow_squares(y, prediction):
    """Its gradient for the prediction is in float16, whatever the layers compute in."""
    return 1e3 * squares(y, tf.cast(prediction, tf.float16))


@program(2)
def small_root_under_an_overflow():
    """A layer that float32 helps, in a step whose scale is too high as well, outside of the layers."""
    return two(SmallRoot(name="root", dtype="mixed_float16")), {"loss": narrow_squares}


class Stubborn(keras.layers.Layer):
    """A layer into which float16 is written."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel", initializer="ones")

    def call(self, x):
        return keras.ops.square(tf.matmul(tf.cast(x, tf.float16), self.kernel))


@program(2)
def beside_a_stubborn():
    """A layer that float32 helps, before one that runs in float16 alone."""
    layers = [Norm(1e-8, name="norm", dtype="mixed_float16"), Stubborn(name="stubborn", dtype="mixed_float16")]
    return dense(*layers, plain(1, "out")), {"x": inputs_with(0.0, 1)}


class Spread(keras.layers.Layer):
    """Divides by the distance of the largest from the smallest value, which may be 0."""

    def call(self, x):
        low, high = keras.ops.min(x, axis=-1, keepdims=True), keras.ops.max(x, axis=-1, keepdims=True)
        return (x - low) / (high - low)


@program(2)
def zero_over_zero():
    """A row whose values are all the same, so that no other input helps."""
    return dense(Spread(name="spread", dtype="mixed_float16"), plain(1, "out")), {"x": inputs_with(0.5, 2)}


@tf.custom_gradient
def direction(x):
    """x / |x|, whose gradient divides by |x|."""

    def grad(upstream):
        return upstream * tf.abs(x) / tf.abs(x)

    return tf.sign(x), grad


class Direction(keras.layers.Layer):
    """Finite at 0, and its gradient is not."""

    def call(self, x):
        return direction(x)


@program(2)
def custom_gradient():
    """A custom gradient that divides 0 by 0, after a layer that gives a 0."""
    return two(Direction(name="direction", dtype="mixed_float16"), activation="relu")


def relative(y, prediction):
    """Divides by a target that is 0."""
    return tf.reduce_mean(tf.abs(tf.cast(prediction, tf.float32) - y) / tf.abs(y))


@program(2)
def loss_over_zero():
    """A relative error in the loss."""
    y = inputs(16, 1)
    y[2] = 0.0
    return two(), {"loss": relative, "y": y}


def clamped_loss(y, probability):
    kept = tf.clip_by_value(probability, 1e-6, 1 - 1e-6)
    losses = tf.cast(y, kept.dtype) * tf.math.log(kept) + tf.cast(1 - y, kept.dtype) * tf.math.log(1 - kept)
    return -tf.reduce_mean(tf.cast(losses, tf.float32))


@program(3)
def clamp():
    """A clamp of 1 - 1e-6, which is 1 in float16."""
    sure = plain(1, "sure", activation="sigmoid", kernel_initializer=keras.initializers.Constant(5.0))
    return dense(sure), {"loss": clamped_loss, "x": np.abs(inputs(16, 8)) + 1, "y": np.ones((16, 1), np.float32)}


@program(3)
def norm_in_the_loss():
    """The norm of a weight that is 0, as a penalty in float16. At a scale of 2^-12 its gradient is 0, and finite."""
    first = plain(8, "first", kernel_initializer="zeros")

    def loss(y, prediction):
        penalty = tf.constant(1e-4, tf.float16) * tf.norm(tf.cast(first.kernel, tf.float16))
        return squares(y, prediction) + tf.cast(penalty, tf.float32)

    return dense(first, plain(1, "out")), {"loss": loss}


class Sampling(keras.layers.Layer):
    """The mean and the variance of a variational autoencoder, whose logarithm has no bound."""

    def call(self, given):
        mean, log_variance = given
        return mean + keras.ops.exp(log_variance)


@program(2)
def unbounded_variance():
    """The variance overflows in float16; in float32 the loss is 1e10."""
    x = keras.Input((8,))
    wide = keras.initializers.RandomNormal(0, 2.0, seed=3)
    given = [plain(4, "mean")(x), plain(4, "log_variance", kernel_initializer=wide)(x)]
    decoded = plain(8, "decoded")(Sampling(name="sampling", dtype="mixed_float16")(given))
    return keras.Model(x, decoded), {"y": inputs(16, 8)}


def logs(y, probabilities):
    picked = tf.gather(probabilities, tf.cast(y, tf.int32), axis=1, batch_dims=1)
    return -tf.reduce_mean(tf.cast(tf.math.log(picked), tf.float32))


@program(3)
def float16_softmax():
    """A float16 softmax over large logits, and a logarithm after it."""
    softmax = keras.layers.Softmax(name="softmax", dtype="mixed_float16")
    logits = plain(4, "logits", kernel_initializer=keras.initializers.RandomNormal(0, 3.0, seed=1))
    return dense(logits, softmax), {"loss": logs, "x": inputs(16, 8) * 2, "y": np.zeros(16, np.float32)}


@program(12)
def healthy():
    """Nothing: a scale that begins too high finds its level."""
    return two(activation="relu"), {"strategy": scaler.Dynamic(initial_scale=2.0**19)}


@program(6)
def window():
    """NaN in the first micro-batch of a window."""
    return two(), {"x": inputs_with(np.nan, (9, 3)), "accumulate": 2}


@program(4)
def outlier_in_a_window():
    """An example that overflows a layer, in the first micro-batch of a window."""
    return two(kernel_initializer="ones"), {"x": np.abs(inputs_with(4e4, 9)), "accumulate": 2}


@program(3)
def beyond_float16():
    """A value of the batch that float16 cannot hold."""
    return two(), {"x": inputs_with(1e5, 6)}


@program(4)
def second_moment():
    """Adam's epsilon of 1e-8 in float16, whose weights have no masters."""
    layers = [keras.layers.Dense(units, name=name, dtype="float16") for units, name in ((8, "first"), (1, "out"))]
    unusual = {"x": inputs(16, 8) * 1e-3, "y": inputs(16, 1) * 1e-3, "allow_16bit_updates": True}
    return dense(*layers), {**unusual, "optimizer": keras.optimizers.Adam(1e-3, epsilon=1e-8)}


@program(8)
def schedule():
    """A schedule that makes the learning rate too large."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.01, 1e4])
    return two(activation="relu"), {"optimizer": keras.optimizers.SGD(rate)}


@keras.saving.register_keras_serializable("planted")
class Ending(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that is NaN from its fourth step on."""

    def __call__(self, step):
        return 1e-3 * tf.sqrt(3.0 - tf.cast(step, tf.float32))

    def get_config(self):
        return {}


@program(5)
def nan_rate():
    """A schedule that takes the root of what becomes negative."""
    return two(activation="relu"), {"optimizer": keras.optimizers.Adam(Ending())}


@program(8)
def outlier():
    """One example that overflows at the scale of the others, in a run that is healthy beside."""
    x = inputs(64, 8)
    x[26] *= 60.0
    return two(), {"x": x, "y": inputs(64, 1)}


@program(3)
def before_a_loop():
    """An overflow before a recurrent layer, whose loop is one operation of the graph."""
    units = keras.layers.Rescaling(1e5, name="units", dtype="mixed_float16")
    layers = [units, keras.layers.LSTM(4, name="lstm", dtype="mixed_float16"), plain(1, "out")]
    model = keras.Sequential([keras.Input((4, 8)), *layers])
    return model, {"x": inputs(16, 4, 8)}


class ByHand(tf.Module):
    """A step of one's own: a loss of two layers, and what becomes of the gradients."""

    def __init__(self, loss, strategy, model=None, name="loss", rate=0.01):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.model, self.optimizer = model or two(), keras.optimizers.SGD(rate)
        self.loss, self.loss_scaler, self.named = loss, scaler.LossScaler(strategy), name

    def __call__(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.model(x, training=True))
            scaled = self.loss_scaler.scale(loss)
        weights = self.model.trainable_variables
        outcome = self.loss_scaler.apply(self.optimizer, self.used(tape.gradient(scaled, weights)), weights)
        return {self.named: loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale, **self.told(outcome)}

    def used(self, grads):
        return grads

    def told(self, outcome):
        return {}


class Uncleared(ByHand):
    """Sums gradients over steps, and does not clear the sum."""

    def __init__(self):
        super().__init__(squares, scaler.Static(2.0**10), rate=1e-7)
        self.sums = [tf.Variable(tf.zeros(one.shape, tf.float16), name="sum") for one in self.model.trainable_variables]

    def used(self, grads):
        for total, grad in zip(self.sums, grads, strict=True):
            total.assign_add(tf.cast(grad, tf.float16))
        return [tf.convert_to_tensor(one) for one in self.sums]

    def told(self, outcome):
        return {"cause": outcome.cause}


def uncleared(run):
    """Gradients summed without being cleared."""
    return loop_of(Uncleared(), inputs(16, 8), inputs(16, 1) + 5, run)


STEPS["uncleared"] = 14


class Annealed(ByHand):
    """Divides by a temperature of its own."""

    def __init__(self):
        super().__init__(self._loss, scaler.Static(4.0))
        self.temperature = tf.Variable(3.0, name="temperature")

    def _loss(self, y, prediction):
        return squares(y, tf.cast(prediction, tf.float32) / self.temperature)

    def __call__(self, x, y):
        self.temperature.assign_sub(1.0)
        return super().__call__(x, y)


def annealed(run):
    """A temperature that reaches 0: no loss scale helps, and no weight has gone bad."""
    return loop_of(Annealed(), inputs(16, 8), inputs(16, 1), run)


STEPS["annealed"] = 3


def compiled(run):
    """A scale that is too high, in a step that is a `tf.function` already."""
    step = ByHand(squares, scaler.Static(2.0**20))
    return loop_of(tf.function(step.__call__), inputs(16, 8), inputs(16, 1) + 3, run)


STEPS["compiled"] = 4


def log_of_zero(y, prediction):
    return -tf.reduce_mean(tf.math.log(tf.cast(prediction, tf.float32)))


def nameless_loss(run):
    """A log of 0 in a step of one's own that returns its loss under another name."""
    keras.utils.set_random_seed(1)
    step = ByHand(log_of_zero, scaler.Static(4.0), dense(plain(8, "first", activation="relu")), name="entropy")
    return loop_of(step, inputs(16, 8), inputs(16, 1), run)


STEPS["nameless_loss"] = 2


def on_replicas(run):
    """An example of the second replica's share that overflows a layer."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(2)
    with strategy.scope():
        loss_scaler = scaler.LossScaler(scaler.Dynamic(initial_scale=2.0**10))
        step = loops.TrainStep(
            two(kernel_initializer="ones"), squares, keras.optimizers.SGD(0.01), loss_scaler=loss_scaler
        )
    return loop_of(step, np.abs(inputs_with(3e4, 10)), inputs(16, 1), run, strategy=strategy)


STEPS["on_replicas"] = 4


class Cube(keras.layers.Layer):
    """Overflows before its small factor, unless TensorFlow multiplies by that first, as it does in most graphs."""

    def call(self, x):
        return (x * 50.0) ** 3 * tf.cast(1e-6, x.dtype)


@program(steps=3)
def regrouped():
    layers = [keras.layers.Dense(16, "relu", dtype="mixed_float16"), Cube(name="cube", dtype="mixed_float16")]
    model = dense(*layers, keras.layers.Dense(1, dtype="mixed_float16"))
    return model, {"x": inputs(32, 8), "y": inputs(32, 1)}
