"""What is not finite is followed through complex values, and through integers and strings, which are always finite."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaler
from loops.diagnose.explain.examples import example_of
from loops.diagnose.graph.origin import magnitude, origins, pass_of
from loops.diagnose.graph.scan import scan

BAD = [[1.0, 2.0], [np.nan, 4.0]]


def traced(take, batch):
    """A step that scales the loss that `take` gives, and the frames in which what is not finite in it began."""
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(2.0)), keras.optimizers.SGD()

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(take(batch), tf.float32))
            scaled = loss_scaler.scale(loss)
        weight = [one for one in tape.watched_variables() if one.dtype.is_floating]
        loss_scaler.apply(optimizer, tape.gradient(scaled, weight), weight)
        return {"loss": loss}

    found = scan(step, batch, {}, [loss_scaler])
    failed = found.losses + [name for grads in found.gradients for name in grads if name]
    return found, origins(found.frames, [name for name in failed if not found.frames[name].finite])


WEIGHT = tf.Variable([[1.0], [1.0]], name="weight")


IN_FLOATS = [
    lambda x: tf.math.real(tf.cast(tf.complex(x, x), tf.complex128)),
    lambda x: tf.abs(tf.signal.stft(tf.tile(x, [1, 8]), 4, 2)),  # Through an FFT.
    lambda x: tf.image.resize(x[tf.newaxis, ..., tf.newaxis], [4, 4]),
    lambda x: tf.map_fn(lambda row: row * 2.0, x),
    lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2.0), [0, x])[1],
    lambda x: tf.cond(tf.reduce_sum(WEIGHT) > 0.0, lambda: x * 2.0, lambda: x),
    lambda x: tf.RaggedTensor.from_tensor(x).to_tensor(),
    lambda x: tf.sparse.to_dense(tf.sparse.from_dense(x)),
    lambda x: tf.nn.embedding_lookup(x, [0, 1]),
    lambda x: tf.function(lambda y: y * 2.0)(x),
]
OTHERWISE = {
    "bits": lambda x: tf.bitcast(tf.bitcast(x, tf.int32), tf.float32),
    "integers": lambda x: tf.cast(tf.cast(x, tf.int32), tf.float16),
    "strings": lambda x: tf.strings.to_number(tf.strings.as_string(x)),
    "float8": lambda x: tf.cast(tf.cast(x, tf.dtypes.experimental.float8_e5m2), tf.float32),
    "numpy": lambda x: tf.numpy_function(lambda y: y * 2.0, [x], tf.float32),
}


def summed(*ways):
    """A loss that has what each way makes of the batch."""
    return lambda x: tf.add_n([tf.cast(tf.reduce_sum(way(x)), tf.float32) for way in ways]) * WEIGHT


def test_a_nan_of_the_batch_is_found_behind_operations_on_floats():
    """One way that loses the trail would be an origin of its own."""
    found, first = traced(summed(*IN_FLOATS), tf.constant(BAD))
    assert [(one.name, pass_of(one, found.frames)) for one in first] == [("batch:0", "data")]


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_nan_of_the_batch_is_found_behind(name):
    found, (first, *_) = traced(summed(OTHERWISE[name]), tf.constant(BAD))
    assert (first.name, pass_of(first, found.frames)) == ("batch:0", "data")


@pytest.mark.parametrize(
    "batch",
    [
        tf.RaggedTensor.from_row_splits([1.0, 2.0, np.nan], [0, 0, 2, 3]),
        tf.SparseTensor([[0, 0], [2, 1]], [1.0, np.nan], [4, 2]),
        tf.constant([1, 2, np.nan], tf.complex64),
    ],
    ids=["ragged", "sparse", "complex"],
)
def test_the_batch_itself_may_be_of_another_kind(batch):
    def values(x):
        return x if isinstance(x, tf.Tensor) else x.values

    found, (first, *_) = traced(lambda x: tf.cast(tf.reduce_sum(values(x)), tf.float32) * WEIGHT, batch)
    assert pass_of(first, found.frames) == "data"
    assert example_of(batch) == 2


def test_an_integer_of_the_batch_that_a_cast_makes_infinite_is_of_the_batch():
    found, (first, *_) = traced(lambda x: tf.cast(x, tf.float16) * tf.cast(WEIGHT, tf.float16), tf.constant([[10**6]]))
    assert (first.kind, pass_of(first, found.frames)) == ("Cast", "data")


@pytest.mark.parametrize(
    "read",
    [
        lambda x, table: tf.nn.embedding_lookup(table, tf.cast(x, tf.int32)),
        lambda x, table: tf.map_fn(lambda one: one * tf.reduce_sum(table), x),
        lambda x, table: tf.function(lambda y: y * tf.reduce_sum(table))(x),
        lambda x, table: table.sparse_read(tf.cast(x, tf.int32)),
    ],
    ids=["lookup", "loop", "call", "sparse_read"],
)
def test_a_weight_is_found_where_no_operation_reads_the_whole_of_it(read):
    table = tf.Variable([1.0, np.inf], name="table")
    found, (first, *_) = traced(lambda x: read(x, table) * WEIGHT, tf.constant([0.0, 1.0]))
    assert pass_of(first, found.frames) == "weights"


def test_what_the_step_assigned_is_no_weight():
    """It was finite before."""
    state = tf.Variable([[0.0, 0.0], [0.0, 0.0]], trainable=False)

    def take(x):
        state.assign(x)
        return tf.reduce_sum(state) * WEIGHT

    found, (first, *_) = traced(take, tf.constant(BAD))
    assert pass_of(first, found.frames) == "data"


@pytest.mark.parametrize(
    ("read", "batch"),
    [
        (lambda x: tf.io.decode_raw(x, tf.float32), tf.constant([np.float32(np.nan).tobytes()])),
        (lambda x: tf.strings.to_number(x), tf.constant(["nan"])),
    ],
    ids=["bytes", "text"],
)
def test_where_the_trail_is_lost_nothing_is_blamed(read, batch):
    _, (first, *_) = traced(lambda x: tf.reduce_sum(read(x)) * WEIGHT, batch)
    assert first.blind


def test_a_mask_that_came_from_a_nan_is_not_followed_where_a_value_explains_it():
    """Examples that are marked with a NaN and taken out are no cause."""

    def take(x):
        kept = tf.where(tf.math.is_nan(x), 0.0, x)
        return tf.where(tf.math.is_nan(x), tf.math.log(kept - 1.0), kept) * WEIGHT[0]

    _, (first, *_) = traced(take, tf.constant(BAD))
    assert first.kind == "Log"


def test_the_magnitude_of_any_numbers():
    assert magnitude(np.array([3.0 + 4.0j], np.complex64)) == (4.0, False)
    assert magnitude(np.array(complex(np.nan, -np.inf))) == (np.inf, True)
    assert magnitude(np.zeros([0], np.float16)) == (0.0, False)
    assert magnitude(np.array([-(2**31)], np.int32)) == (2.0**31, False)
