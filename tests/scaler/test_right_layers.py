"""No right step is suspected, whichever layers its gradients pass through; and wrong ones are, where all is known."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_programs import trace_no_branches
from ways import graph

import scaler

L = keras.layers
X = tf.constant(np.random.default_rng(0).normal(size=[4, 6, 8]).astype("float32"))


@pytest.fixture(autouse=True)
def _without_branches(monkeypatch):
    trace_no_branches(monkeypatch)


def of_layer(make):
    """A loss of a layer's output for sequences."""

    def build():
        layer = make()
        if not layer.built:
            layer.build([None, 6, 8])
        return layer.trainable_variables, lambda: tf.reduce_mean(tf.square(tf.cast(layer(X, training=True), X.dtype)))

    return build


def of_image(make):
    def build():
        layer, images = make(), tf.reshape(X[..., :3], [4, 6, 1, 3]) * tf.ones([1, 1, 6, 1])
        layer.build([None, 6, 6, 3])
        return layer.trainable_variables, lambda: tf.reduce_mean(tf.square(layer(images, training=True)))

    return build


def of_weight(shape, function):
    """A loss of one weight."""

    def build():
        weight = tf.Variable(np.random.default_rng(1).uniform(0.5, 1.5, size=shape).astype("float32"))
        return [weight], lambda: function(weight)

    return build


def spd(weight):
    return tf.matmul(weight, weight, transpose_b=True) + tf.eye(4)


STEPS = {
    "attention": of_layer(lambda: Attends()),
    "LSTM": of_layer(lambda: L.LSTM(3, return_sequences=True)),
    "bidirectional": of_layer(lambda: L.Bidirectional(L.SimpleRNN(3))),
    "layer normalization": of_layer(L.LayerNormalization),
    "batch normalization": of_layer(L.BatchNormalization),
    "group normalization": of_layer(lambda: L.GroupNormalization(4)),
    "spectral normalization": of_layer(lambda: L.SpectralNormalization(L.Dense(3))),
    "unit normalization": of_layer(lambda: keras.Sequential([L.Dense(3), L.UnitNormalization()])),
    "convolution": of_layer(lambda: L.Conv1D(3, 2)),
    "separable": of_layer(lambda: L.SeparableConv1D(3, 2)),
    "einsum": of_layer(lambda: L.EinsumDense("abc,cd->abd", [None, 5], bias_axes="d")),
    "PReLU": of_layer(L.PReLU),
    "float8": of_layer(lambda: float8()),
    "images": of_image(lambda: keras.Sequential([L.Conv2D(4, 3), L.MaxPooling2D(), L.Flatten(), L.Dense(2)])),
    "upsampled": of_image(lambda: keras.Sequential([L.Conv2D(4, 3), L.UpSampling2D(interpolation="bilinear")])),
    "average pooling": of_image(lambda: keras.Sequential([L.Conv2D(4, 3), L.AveragePooling2D(2)])),
    "an embedding": lambda: _embedding(),
    "a sparse product": of_weight([6, 2], lambda w: tf.reduce_sum(tf.sparse.sparse_dense_matmul(_sparse(), w) ** 2)),
    "ragged": of_weight([8, 2], lambda w: tf.reduce_mean(tf.reduce_sum(tf.gather(w, _ragged()), 1) ** 2)),
    "a segment sum": of_weight([5, 2], lambda w: tf.reduce_sum(tf.math.segment_sum(w, [0, 0, 1, 1, 2]) ** 2)),
    "fft": of_weight([8], lambda w: tf.reduce_sum(tf.abs(tf.signal.rfft(w)) ** 2)),
    "svd": of_weight([4, 4], lambda w: tf.reduce_sum(tf.linalg.svd(w, compute_uv=False))),
    "cholesky": of_weight([4, 4], lambda w: tf.reduce_sum(tf.linalg.cholesky(spd(w)))),
    "an inverse": of_weight([4, 4], lambda w: tf.reduce_sum(tf.linalg.inv(spd(w)))),
    "a determinant": of_weight([4, 4], lambda w: tf.linalg.logdet(spd(w))),
    "a solved system": of_weight([4, 4], lambda w: tf.reduce_sum(tf.linalg.solve(spd(w), tf.ones([4, 1])))),
    "a norm": of_weight([4, 4], tf.norm),
    "logsumexp": of_weight([4, 4], lambda w: tf.reduce_sum(tf.reduce_logsumexp(w, 1))),
    "cross entropy": of_weight(
        [4, 4], lambda w: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2, 3], w))
    ),
    "CTC": of_weight([4, 5, 3], lambda w: tf.reduce_mean(_ctc(w))),
    "sorted": of_weight([8], lambda w: tf.reduce_sum(tf.sort(w)[:3] ** 2)),
    "the largest": of_weight([8], lambda w: tf.reduce_sum(tf.math.top_k(w, 3).values ** 2)),
    "cumulated": of_weight([8], lambda w: tf.reduce_sum(tf.cumsum(w) ** 2) + tf.reduce_sum(tf.math.cumprod(w))),
    "scattered": of_weight([3], lambda w: tf.reduce_sum(tf.scatter_nd([[0], [2], [2]], w, [4]) ** 2)),
    "rounded straight through": of_weight([8], lambda w: tf.reduce_sum((w + tf.stop_gradient(tf.round(w) - w)) ** 2)),
    "clipped features": of_weight([8], lambda w: tf.reduce_sum(tf.clip_by_value(w, 0.7, 1.2) ** 2)),
    "a clipped norm of features": of_weight([8], lambda w: tf.reduce_sum(tf.clip_by_norm(w, 0.5) ** 2)),
    "a focal loss": of_weight([8], lambda w: tf.reduce_mean((1.0 - tf.sigmoid(w)) ** 2 * tf.math.softplus(-w))),
    "Huber": of_weight([8], lambda w: keras.losses.Huber(0.1)(tf.ones([1, 8]), w[None])),
    "cosine": of_weight([8], lambda w: keras.losses.CosineSimilarity()(tf.ones([1, 8]), w[None])),
    "Poisson": of_weight([8], lambda w: keras.losses.Poisson()(tf.ones([1, 8]), w[None])),
    "a scan": of_weight([3], lambda w: tf.reduce_sum(tf.scan(lambda a, x: tf.tanh(a * x), w, 1.0))),
    "a while loop": of_weight([3], lambda w: tf.while_loop(lambda i, a: i < 3, _turn(w), [0, w])[1][0]),
    "vectorized": of_weight([4, 3], lambda w: tf.reduce_sum(tf.vectorized_map(lambda x: tf.sin(x) * x, w))),
    "resized": of_weight([1, 4, 4, 1], lambda w: tf.reduce_sum(tf.image.resize(w, [7, 7]) ** 2)),
    "patches": of_weight(
        [1, 4, 4, 1],
        lambda w: tf.reduce_sum(tf.image.extract_patches(w, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID") ** 2),
    ),
}


class Attends(L.Layer):
    def build(self, shape):
        self.inner = L.MultiHeadAttention(2, 4, dropout=0.1)
        self.inner.build(shape, shape)

    def call(self, x, training=None):
        return x + self.inner(x, x, training=training, use_causal_mask=True)


def float8():
    """Its backward pass limits gradients to what float8 can hold."""
    layer = L.Dense(4, dtype="mixed_float16")
    layer.build([None, 6, 8])
    layer.quantize("float8")
    return layer


def _embedding():
    layer = L.Embedding(7, 3)
    layer.build()
    return layer.trainable_variables, lambda: tf.reduce_mean(layer(tf.constant([[1, 2, 2], [3, 3, 0]])) ** 2)


def _sparse():
    return tf.sparse.from_dense(tf.constant(np.tri(4, 6), tf.float32))


def _ragged():
    return tf.ragged.constant([[0, 1, 2], [3], [4, 5]])


def _ctc(logits):
    return tf.nn.ctc_loss(tf.constant([[1, 2], [2, 1], [1, 1], [2, 2]]), logits, [2] * 4, [5] * 4, False)


def _turn(weight):
    return lambda number, value: (number + 1, tf.sin(value) * weight)


UNKNOWN = {"cholesky", "a determinant", "CTC", "fft"}
"""Of their derivatives not all operations are known, so that nothing is said of a wrong step."""


def new_scaler():
    return scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=1))


def trace(step):
    """Traces a step whose warnings are errors, but for state that a skip would not put back."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "(?s).*without rollback")
        graph(step).get_concrete_function()


@pytest.mark.parametrize("half", [0, 1])
def test_no_right_step_is_suspected(half):
    parts, loss_scaler = [build() for build in list(STEPS.values())[half::2]], new_scaler()
    weights = [weight for own, _ in parts for weight in own]

    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.add_n([loss() for _, loss in parts]))
        return loss_scaler.apply(scaler.move_nothing, tape.gradient(scaled, weights), weights).finite

    trace(step)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STEPS if name != "bidirectional"])  # As an LSTM.
def test_wrong_ones_are_noticed(name):
    """The square of the scaled loss is refused, and a loss that nobody scaled is not passed over."""
    (weights, loss), squares, forgets = STEPS[name](), new_scaler(), new_scaler()
    noticed = []

    def step():
        with tf.GradientTape(persistent=True) as tape:
            plain = loss()
            square, forgotten = tf.square(squares.scale(plain)), plain + 0.0 * forgets.scale(tf.constant(1.0))
        for own, wrong in ((squares, square), (forgets, forgotten)):
            try:
                own.apply(scaler.move_nothing, tape.gradient(wrong, weights), weights)
            except (scaler.InvalidArgument, scaler.ScaleWarning):
                noticed.append(own)

    trace(step)
    assert noticed == ([forgets] if name in UNKNOWN else [squares, forgets])
