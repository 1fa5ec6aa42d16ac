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
    """Names a function that gives (model, loss, batches, options), and makes it one that gives the loop."""

    def of(function):
        STEPS[function.__name__] = steps

        @functools.wraps(function)
        def build(run: pathlib.Path) -> loops.Loop:
            keras.utils.set_random_seed(1)
            model, loss, (x, y), options = function()
            step = loops.TrainStep(
                model,
                loss,
                options.pop("optimizer", None) or keras.optimizers.SGD(0.01),
                loss_scaler=scaler.LossScaler(options.pop("strategy", scaler.Dynamic(initial_scale=2.0**10))),
                **options,
            )
            return loop_of(step, x, y, run)

        # Whoever asks for its arguments is to be told its own.
        del build.__wrapped__
        return build

    return of


def loop_of(step, x, y, run):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True).repeat()
    return loops.Loop(
        step,
        data,
        actions=[loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)],
        jit_compile=False,  # XLA keeps more than 16 bits between operations, so that some of these would be finite.
    )


def inputs(*shape):
    return np.random.RandomState(0).normal(size=shape).astype(np.float32)


def dense(*layers, width=8):
    return keras.Sequential([keras.Input((width,)), *layers])


def plain(units, name, **options):
    return keras.layers.Dense(units, name=name, dtype="mixed_float16", **options)


@program(6)
def large_weights():
    """A layer whose weights are 1e4."""
    big = plain(8, "big", kernel_initializer=keras.initializers.Constant(1e4))
    model = dense(plain(8, "first", kernel_initializer="ones"), big, plain(1, "out"))
    return model, squares, (np.abs(inputs(16, 8)) + 1, inputs(16, 1)), {}


@program(8)
def learning_rate():
    """A learning rate that is too large."""
    model = dense(plain(8, "first", activation="relu"), plain(1, "out"))
    return model, squares, (inputs(16, 8), inputs(16, 1)), {"optimizer": keras.optimizers.SGD(60.0)}


@program(8)
def weight_decay():
    """A weight decay of the wrong sign, which makes the weights ten times as large at each step."""
    model = dense(plain(8, "first"), plain(1, "out"))
    optimizer = keras.optimizers.SGD(1e-6, weight_decay=-9e6)
    return model, squares, (inputs(16, 8), inputs(16, 1)), {"optimizer": optimizer}


@program(5)
def nan_batch():
    """NaN in one batch."""
    x = inputs(16, 8)
    x[9, 3] = np.nan
    return dense(plain(8, "first"), plain(1, "out")), squares, (x, inputs(16, 1)), {}


@program(4)
def nan_column():
    """A column that is NaN in every example."""
    x = inputs(16, 8)
    x[:, 3] = np.nan
    return dense(plain(8, "first"), plain(1, "out")), squares, (x, inputs(16, 1)), {}


@program(12)
def nan_batch_then_overflow():
    """NaN in the third batch, and from the next on inputs whose exponentials float16 does not hold."""
    x = inputs(64, 8) * 0.1
    x[9, 3] = np.nan
    x[12:] *= 400
    exponential = keras.layers.Lambda(keras.ops.exp, name="exponential", dtype="mixed_float16")
    return dense(plain(8, "first", activation="relu"), exponential, plain(1, "out")), squares, (x, inputs(64, 1)), {}


@program(6)
def nan_batches_then_fine():
    """NaN in the third and the fourth batch."""
    x = inputs(64, 8)
    x[9, 3] = x[13, 2] = np.nan
    return dense(plain(8, "first"), plain(1, "out")), squares, (x, inputs(64, 1)), {}


@program(24)
def flushed():
    """A loss of a tiny weight, the gradients of which float16 does not hold at a scale of 1."""
    model = dense(plain(8, "first"), plain(8, "second"), plain(1, "out"))
    return model, lambda y, p: 1e-9 * squares(y, p), (inputs(16, 8), inputs(16, 1)), {"strategy": scaler.Static(1.0)}


@program(24)
def clipped_loss():
    """A loss that is clipped, so that it does not depend on the weights."""
    model = dense(plain(8, "first"), plain(1, "out"))
    return model, lambda y, p: tf.maximum(squares(y, p), 1e3), (inputs(16, 8), inputs(16, 1)), {}


@program(4)
def high_floor():
    """A scale with too high a floor."""
    strategy = scaler.Dynamic(initial_scale=2.0**24, min_scale=2.0**22, max_scale=2.0**24)
    return (
        dense(plain(8, "first"), plain(1, "out")),
        squares,
        (inputs(16, 8), inputs(16, 1) + 3),
        {"strategy": strategy},
    )


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
    norm = Norm(1e-8, name="norm", dtype="mixed_float16")
    x = inputs(16, 8)
    x[5] = 0.0
    return dense(norm, plain(1, "out")), squares, (x, inputs(16, 1)), {}


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
    x = inputs(16, 8)
    x[5] = -1.0
    masked = Masked(-1e9, name="masked", dtype="mixed_float16")
    return dense(masked, plain(1, "out")), squares, (x, inputs(16, 1)), {}


class MaskedByLiteral(keras.layers.Layer):
    """The same with the number in the call."""

    def call(self, x):
        keep = keras.ops.cast(x > 0.0, x.dtype)
        return keras.ops.softmax(x + (1.0 - keep) * -1e9)


@program(3)
def literal_mask():
    """A mask of -1e9 that no attribute holds."""
    x = inputs(16, 8)
    x[5] = -1.0
    masked = MaskedByLiteral(name="masked", dtype="mixed_float16")
    return dense(masked, plain(1, "out")), squares, (x, inputs(16, 1)), {}


class NormByLiteral(keras.layers.Layer):
    """Divides by a norm and an epsilon that float16 does not hold."""

    def call(self, x):
        return x / (keras.ops.norm(x, axis=-1, keepdims=True) + 1e-12)


@program(3)
def literal_epsilon():
    """An epsilon of 1e-12 that no attribute holds."""
    x = inputs(16, 8)
    x[5] = 0.0
    norm = NormByLiteral(name="norm", dtype="mixed_float16")
    return dense(norm, plain(1, "out")), squares, (x, inputs(16, 1)), {}


class Root(keras.layers.Layer):
    """A square root that meets 0."""

    def call(self, x):
        return keras.ops.sqrt(keras.ops.relu(x))


@program(3)
def root_at_zero():
    """A square root at 0."""
    model = dense(plain(8, "first"), Root(name="root", dtype="mixed_float16"), plain(1, "out"))
    return model, squares, (inputs(16, 8), inputs(16, 1)), {}


@program(2)
def root_under_an_overflow():
    """The same in a step whose scale is too high as well: it hides the root, and no lower one helps."""
    first = keras.layers.Dense(8, dtype="float16", name="first")
    model = dense(first, Root(name="root", dtype="mixed_float16"), plain(1, "out"))
    return model, lambda y, prediction: 1e3 * squares(y, prediction), (inputs(16, 8), inputs(16, 1)), {}


class Length(keras.layers.Layer):
    """The length of each vector, in float32."""

    def call(self, x):
        return tf.sqrt(tf.reduce_sum(tf.square(tf.cast(x, tf.float32)), -1, keepdims=True))


@program(8)
def rare_root():
    """A root at 0 for one example, in a run that a log of four updates shows as a scale that finds its level."""
    x = inputs(16, 8)
    x[6] = 0
    first = plain(8, "first", use_bias=False)
    return dense(first, Length(name="length"), plain(1, "out")), squares, (x, inputs(16, 1)), {"accumulate": 2}


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
    model = dense(plain(8, "first"), SmallRoot(name="root", dtype="mixed_float16"), plain(1, "out"))
    return model, narrow_squares, (inputs(16, 8), inputs(16, 1)), {}


class Stubborn(keras.layers.Layer):
    """A layer into which float16 is written."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel", initializer="ones")

    def call(self, x):
        return keras.ops.square(tf.matmul(tf.cast(x, tf.float16), self.kernel))


@program(2)
def stubborn():
    """A layer that overflows and runs in float16 alone."""
    model = dense(Stubborn(name="stubborn", dtype="mixed_float16"), plain(1, "out"))
    return model, squares, (np.abs(inputs(16, 8)) + 1e3, inputs(16, 1)), {}


@program(2)
def beside_a_stubborn():
    """A layer that float32 helps, before one that runs in float16 alone."""
    layers = [Norm(1e-8, name="norm", dtype="mixed_float16"), Stubborn(name="stubborn", dtype="mixed_float16")]
    x = inputs(16, 8)
    x[1] = 0.0
    return dense(*layers, plain(1, "out")), squares, (x, inputs(16, 1)), {}


class Spread(keras.layers.Layer):
    """Divides by the distance of the largest from the smallest value, which may be 0."""

    def call(self, x):
        low, high = keras.ops.min(x, axis=-1, keepdims=True), keras.ops.max(x, axis=-1, keepdims=True)
        return (x - low) / (high - low)


@program(2)
def zero_over_zero():
    """A row whose values are all the same, so that no other input helps."""
    x = inputs(16, 8)
    x[2] = 0.5
    return dense(Spread(name="spread", dtype="mixed_float16"), plain(1, "out")), squares, (x, inputs(16, 1)), {}


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
    layers = [plain(8, "first", activation="relu"), Direction(name="direction", dtype="mixed_float16")]
    return dense(*layers, plain(1, "out")), squares, (inputs(16, 8), inputs(16, 1)), {}


def relative(y, prediction):
    """Divides by a target that is 0."""
    return tf.reduce_mean(tf.abs(tf.cast(prediction, tf.float32) - y) / tf.abs(y))


@program(2)
def loss_over_zero():
    """A relative error in the loss."""
    y = inputs(16, 1)
    y[2] = 0.0
    return dense(plain(8, "first"), plain(1, "out")), relative, (inputs(16, 8), y), {}


@program(2)
def regularizer():
    """A penalty that overflows in float16: 0.01 * 64 * 100^2 would not, its sum before does."""
    hundred, penalty = keras.initializers.Constant(100.0), keras.regularizers.L2(0.01)
    big = keras.layers.Dense(8, name="big", dtype="float16", kernel_initializer=hundred, kernel_regularizer=penalty)
    model = dense(plain(8, "first"), big, plain(1, "out"))
    return model, squares, (inputs(16, 8) * 1e-2, inputs(16, 1)), {"allow_16bit_updates": True}


def clamped_loss(y, probability):
    kept = tf.clip_by_value(probability, 1e-6, 1 - 1e-6)
    losses = tf.cast(y, kept.dtype) * tf.math.log(kept) + tf.cast(1 - y, kept.dtype) * tf.math.log(1 - kept)
    return -tf.reduce_mean(tf.cast(losses, tf.float32))


@program(3)
def clamp():
    """A clamp of 1 - 1e-6, which is 1 in float16."""
    sure = plain(1, "sure", activation="sigmoid", kernel_initializer=keras.initializers.Constant(5.0))
    return dense(sure), clamped_loss, (np.abs(inputs(16, 8)) + 1, np.ones((16, 1), np.float32)), {}


@program(3)
def norm_in_the_loss():
    """The norm of a weight that is 0, as a penalty in float16. At a scale of 2^-12 its gradient is 0, and finite."""
    first = plain(8, "first", kernel_initializer="zeros")

    def loss(y, prediction):
        penalty = tf.constant(1e-4, tf.float16) * tf.norm(tf.cast(first.kernel, tf.float16))
        return squares(y, prediction) + tf.cast(penalty, tf.float32)

    return dense(first, plain(1, "out")), loss, (inputs(16, 8), inputs(16, 1)), {}


class Distance(keras.layers.Layer):
    """Adds the norm of a weight that is 0 to its input."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(8,), name="kernel", initializer="zeros")

    def call(self, x):
        return x * 0.0 + keras.ops.sqrt(keras.ops.sum(keras.ops.square(self.kernel)))


@program(2)
def distance():
    """Nothing that is tried helps, and predictions that are clipped have no gradient."""
    return dense(Distance(name="distance", dtype="mixed_float16")), squares, (inputs(16, 8), inputs(16, 8)), {}


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
    return keras.Model(x, decoded), squares, (inputs(16, 8), inputs(16, 8)), {}


def logs(y, probabilities):
    picked = tf.gather(probabilities, tf.cast(y, tf.int32), axis=1, batch_dims=1)
    return -tf.reduce_mean(tf.cast(tf.math.log(picked), tf.float32))


@program(3)
def float16_softmax():
    """A float16 softmax over large logits, and a logarithm after it."""
    softmax = keras.layers.Softmax(name="softmax", dtype="mixed_float16")
    logits = plain(4, "logits", kernel_initializer=keras.initializers.RandomNormal(0, 3.0, seed=1))
    return dense(logits, softmax), logs, (inputs(16, 8) * 2, np.zeros(16, np.float32)), {}


@program(12)
def healthy():
    """Nothing: a scale that begins too high finds its level."""
    model = dense(plain(8, "first", activation="relu"), plain(1, "out"))
    return model, squares, (inputs(16, 8), inputs(16, 1)), {"strategy": scaler.Dynamic(initial_scale=2.0**19)}


@program(20)
def short_interval():
    """Nothing: a scale that grows every few steps, and is taken back each time."""
    strategy = scaler.Dynamic(initial_scale=2.0**15, growth_interval=3)
    model = dense(plain(8, "first", activation="relu"), plain(1, "out"))
    x, y = inputs(4, 8), inputs(4, 1)
    return model, squares, (x, y), {"strategy": strategy, "optimizer": keras.optimizers.SGD(1e-9)}


@program(6)
def window():
    """NaN in the first micro-batch of a window."""
    x = inputs(16, 8)
    x[9, 3] = np.nan
    return dense(plain(8, "first"), plain(1, "out")), squares, (x, inputs(16, 1)), {"accumulate": 2}


@program(4)
def outlier_in_a_window():
    """An example that overflows a layer, in the first micro-batch of a window."""
    x = np.abs(inputs(16, 8))
    x[9] = 4e4
    first = plain(8, "first", kernel_initializer="ones")
    return dense(first, plain(1, "out")), squares, (x, inputs(16, 1)), {"accumulate": 2}


@program(3)
def beyond_float16():
    """A value of the batch that float16 cannot hold."""
    x = inputs(16, 8)
    x[6] = 1e5
    return dense(plain(8, "first"), plain(1, "out")), squares, (x, inputs(16, 1)), {}


@program(4)
def second_moment():
    """Adam's epsilon of 1e-8 in float16, whose weights have no masters."""
    first = keras.layers.Dense(8, name="first", dtype="float16")
    options = {"optimizer": keras.optimizers.Adam(1e-3, epsilon=1e-8), "allow_16bit_updates": True}
    model = dense(first, keras.layers.Dense(1, name="out", dtype="float16"))
    return model, squares, (inputs(16, 8) * 1e-3, inputs(16, 1) * 1e-3), options


@program(8)
def early_window():
    """NaN in the first micro-batch of a window, with a checkpoint after it."""
    x = inputs(40, 8)
    x[17, 0] = np.nan
    return dense(plain(8, "first"), plain(1, "out")), squares, (x, inputs(40, 1)), {"accumulate": 4}


@program(8)
def schedule():
    """A schedule that makes the learning rate too large."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.01, 1e4])
    model = dense(plain(8, "first", activation="relu"), plain(1, "out"))
    return model, squares, (inputs(16, 8), inputs(16, 1)), {"optimizer": keras.optimizers.SGD(rate)}


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
    model = dense(plain(8, "first", activation="relu"), plain(1, "out"))
    return model, squares, (inputs(16, 8), inputs(16, 1)), {"optimizer": keras.optimizers.Adam(Ending())}


@program(8)
def outlier():
    """One example that overflows at the scale of the others, in a run that is healthy beside."""
    x = inputs(64, 8)
    x[26] *= 60.0
    return dense(plain(8, "first"), plain(1, "out")), squares, (x, inputs(64, 1)), {}


@program(3)
def before_a_loop():
    """An overflow before a recurrent layer, whose loop is one operation of the graph."""
    units = keras.layers.Rescaling(1e5, name="units", dtype="mixed_float16")
    layers = [units, keras.layers.LSTM(4, name="lstm", dtype="mixed_float16"), plain(1, "out")]
    model = keras.Sequential([keras.Input((4, 8)), *layers])
    return model, squares, (inputs(16, 4, 8), inputs(16, 1)), {}


class Uncleared(tf.Module):
    """A step that sums gradients over steps, and does not clear the sum."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.optimizer, self.loss_scaler = model, optimizer, scaler.LossScaler(scaler.Static(2.0**10))
        self.sums = [tf.Variable(tf.zeros(one.shape, tf.float16), name="sum") for one in model.trainable_variables]

    def __call__(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = squares(y, self.model(x, training=True))
            scaled = self.loss_scaler.scale(loss)
        for total, grad in zip(self.sums, tape.gradient(scaled, self.model.trainable_variables), strict=True):
            total.assign_add(tf.cast(grad, tf.float16))
        outcome = self.loss_scaler.apply(
            self.optimizer, [tf.convert_to_tensor(one) for one in self.sums], self.model.trainable_variables
        )
        return {"loss": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale, "cause": outcome.cause}


def uncleared(run):
    """Gradients summed without being cleared."""
    keras.utils.set_random_seed(1)
    model = dense(plain(8, "first"), plain(1, "out"))
    step = Uncleared(model, keras.optimizers.SGD(1e-7))
    return loop_of(step, inputs(16, 8), inputs(16, 1) + 5, run)


STEPS["uncleared"] = 14


def annealed(run):
    """A temperature of the step's own that reaches 0: no loss scale helps, and no weight has gone bad."""
    keras.utils.set_random_seed(1)
    model, temperature = dense(plain(8, "first"), plain(1, "out")), tf.Variable(3.0, name="temperature")
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(4.0)), keras.optimizers.SGD(0.01)

    def step(x, y):
        temperature.assign_sub(1.0)
        with tf.GradientTape() as tape:
            loss = squares(y, tf.cast(model(x, training=True), tf.float32) / temperature)
            scaled = loss_scaler.scale(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        outcome = loss_scaler.apply(optimizer, grads, model.trainable_variables)
        return {"loss": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    return loop_of(step, inputs(16, 8), inputs(16, 1), run)


STEPS["annealed"] = 3


def compiled(run):
    """A scale that is too high, in a step that is a `tf.function` already."""
    keras.utils.set_random_seed(1)
    model = dense(plain(8, "first"), plain(1, "out"))
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(2.0**20)), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = squares(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(
            optimizer, tape.gradient(scaled, model.trainable_variables), model.trainable_variables
        )
        return {"loss": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    return loop_of(step, inputs(16, 8), inputs(16, 1) + 3, run)


STEPS["compiled"] = 4


def nameless_loss(run):
    """A log of 0 in a step of one's own that returns its loss under another name."""
    keras.utils.set_random_seed(1)
    model = dense(plain(8, "first", activation="relu"))
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(4.0)), keras.optimizers.SGD(0.01)

    def step(x, y):
        del y
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(tf.math.log(tf.cast(model(x, training=True), tf.float32)))
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(
            optimizer, tape.gradient(scaled, model.trainable_variables), model.trainable_variables
        )
        return {"entropy": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    return loop_of(step, inputs(16, 8), inputs(16, 1), run)


STEPS["nameless_loss"] = 2


def on_replicas(run):
    """An example of the second replica's share that overflows a layer."""
    keras.utils.set_random_seed(1)
    x = np.abs(inputs(16, 8))
    x[10] = 3e4
    strategy = mirrored(2)
    with strategy.scope():
        model = dense(plain(8, "first", kernel_initializer="ones"), plain(1, "out"))
        loss_scaler = scaler.LossScaler(scaler.Dynamic(initial_scale=2.0**10))
        step = loops.TrainStep(model, squares, keras.optimizers.SGD(0.01), loss_scaler=loss_scaler)
    data = tf.data.Dataset.from_tensor_slices((x, inputs(16, 1))).batch(4, drop_remainder=True).repeat()
    actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)]
    return loops.Loop(step, data, strategy=strategy, actions=actions, jit_compile=False)


STEPS["on_replicas"] = 4


class Cube(keras.layers.Layer):
    """Overflows before its small factor, unless TensorFlow multiplies by that first, as it does in most graphs."""

    def call(self, x):
        return (x * 50.0) ** 3 * tf.cast(1e-6, x.dtype)


@program(steps=3)
def regrouped():
    layers = [keras.layers.Dense(16, "relu", dtype="mixed_float16"), Cube(name="cube", dtype="mixed_float16")]
    model = keras.Sequential([keras.Input([8]), *layers, keras.layers.Dense(1, dtype="mixed_float16")])
    return model, squares, (inputs(32, 8), inputs(32, 1)), {}
