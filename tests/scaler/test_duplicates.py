"""Guards repeated ids of an Embedding: ours is the dense gradient, and `sum_duplicates=False` is Keras bit for bit."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from rigs import raw

import scaler

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
}
LINEAR = ("SGD", "momentum", "Lion")
"""They square nothing, so that summing first changes at most the rounding."""
IDS = ([3, 1, 3, 3], [0, 3, 1, 1])


def plain(optimizer, grads, variables):
    optimizer.apply(grads, variables)


def dense(optimizer, grads, variables):
    optimizer.apply([tf.convert_to_tensor(grad) for grad in grads], variables)


@functools.cache
def trained(name, how, scale=1.0):
    """The bits and the table after two batches with repeated ids, in eager mode: graphs regroup products."""
    table = tf.Variable(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), name="table")
    optimizer = OPTIMIZERS[name]()
    optimizer.build([table])
    loss_scaler = None if callable(how) else scaler.LossScaler(scaler.Static(scale), **dict(how))
    for number, ids in enumerate(IDS):
        weights = np.random.default_rng(number).normal(size=(4, 3)).astype(np.float32)
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            loss = tf.reduce_sum(rows * weights * (1.0 + rows))
            scaled = loss_scaler.scale(loss) if loss_scaler else loss
        grads = tape.gradient(scaled, [table])
        assert isinstance(grads[0], tf.IndexedSlices)
        if loss_scaler:
            assert loss_scaler.apply(optimizer, grads, [table]).finite
        else:
            how(optimizer, grads, [table])
    return raw([table], optimizer.variables), table.numpy()


KEPT = (("sum_duplicates", False),)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_is_the_dense_gradient_and_keras_squares_duplicates_one_by_one(name):
    ours, of_dense, of_keras = (trained(name, how)[1] for how in ((), dense, plain))
    np.testing.assert_allclose(ours, of_dense, rtol=1e-6)
    difference = np.max(np.abs(of_keras - of_dense))
    assert difference < 1e-6 if name in LINEAR else difference > 1e-3


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, 2.0**15) for name in OPTIMIZERS), ("Adam", 1.0), ("Adam", 2.0**-20), ("SGD", 2.0**-20)]
)
def test_duplicates_that_are_kept_give_the_bits_of_keras(name, scale):
    assert trained(name, KEPT, scale)[0] == trained(name, plain)[0]


def step_on(table, optimizer, loss_scaler, values, ids, **arguments):
    grad = tf.IndexedSlices(tf.convert_to_tensor(values), tf.constant(ids), tf.constant(table.shape.as_list()))
    loss_scaler.scale(tf.constant(1.0))
    return loss_scaler.apply(optimizer, [grad], [table], **arguments)


def made(strategy=None):
    table, optimizer = tf.Variable(tf.ones([4, 1])), keras.optimizers.Adam(0.1)
    optimizer.build([table])
    return table, optimizer, scaler.LossScaler(strategy or scaler.NoScaling(), sum_duplicates=False)


NOT_SUMMED = [
    [[2e38], [2e38]],  # Their sum is infinite.
    [[6e18], [1.3e19]],  # The square of their sum is.
    [[1e20], [-1e20]],  # Their sum is zero, and Adam squares each.
    [[float("nan")], [1.0]],
    [[float("inf")], [float("-inf")]],
]


def is_skipped(run, values, table, optimizer):
    before = raw([table], optimizer.variables)
    outcome = run(tf.constant(values))
    assert not outcome.finite
    assert outcome.cause not in (scaler.Cause.NONE, scaler.Cause.UPDATE)  # It was the gradients.
    assert raw([table], optimizer.variables) == before
    assert run(tf.constant([[1.0], [1.0]])).finite


@pytest.mark.parametrize("values", NOT_SUMMED)
def test_what_cannot_be_squared_alone_or_summed_is_skipped(values):
    table, optimizer, loss_scaler = made()
    is_skipped(lambda values: step_on(table, optimizer, loss_scaler, values, [2, 2]), values, table, optimizer)


@pytest.mark.slow
def test_what_cannot_be_squared_alone_or_summed_is_skipped_in_a_graph():
    table, optimizer, loss_scaler = made()
    run = tf.function(lambda values: step_on(table, optimizer, loss_scaler, values, [2, 2]))
    for values in NOT_SUMMED:
        is_skipped(run, values, table, optimizer)


def test_the_norm_and_the_clipping_are_of_the_sum():
    table, optimizer, loss_scaler = made(scaler.Static(4.0))
    outcome = step_on(table, optimizer, loss_scaler, [[12.0], [4.0], [12.0]], [2, 1, 2], clip_norm=0.5)
    np.testing.assert_allclose(outcome.grad_norm, np.sqrt(6**2 + 1**2), rtol=1e-6)
    np.testing.assert_allclose(outcome.clipped_norm, 0.5, rtol=1e-6)
    assert np.all(np.isfinite(table.numpy()))


def test_values_are_clipped_one_by_one_as_keras_does_and_the_norm_is_of_what_was_given():
    table, loss_scaler = tf.Variable(tf.zeros([4, 1])), scaler.LossScaler(scaler.NoScaling(), sum_duplicates=False)
    optimizer = keras.optimizers.SGD(1.0)
    outcome = step_on(table, optimizer, loss_scaler, [[3.0], [4.0]], [2, 2], clip=scaler.ClipByValue(1.0))
    np.testing.assert_array_equal(table.numpy(), [[0], [0], [-2], [0]])
    np.testing.assert_allclose(outcome.clipped_norm, 2.0)


def test_the_long_form_keeps_them_too():
    for kept, values in ((True, [[2.0], [1.0]]), (False, [[3.0], [0.0]])):
        loss_scaler = scaler.LossScaler(scaler.Static(4.0), sum_duplicates=not kept)
        loss_scaler.scale(tf.constant(1.0))
        (grad,) = loss_scaler.unscale([tf.IndexedSlices(tf.constant([[8.0], [4.0]]), tf.constant([1, 1]))])
        np.testing.assert_array_equal(grad.values, values)


@pytest.mark.slow
def test_beside_a_variable_whose_update_is_compiled():
    def run(how):
        table, wide = tf.Variable(tf.ones([4, 2])), tf.Variable(tf.ones([2**18]))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([table, wide])
        loss_scaler = None if how is plain else scaler.LossScaler(scaler.Static(1024.0), **dict(how))

        def step(weights):
            with tf.GradientTape() as tape:
                rows = tf.gather(table, [3, 1, 3, 3])
                loss = tf.reduce_sum(rows * weights * rows) + tf.reduce_sum(wide)
                scaled = loss_scaler.scale(loss) if loss_scaler else loss
            grads = tape.gradient(scaled, [table, wide])
            if loss_scaler:
                loss_scaler.apply(optimizer, grads, [table, wide])
            else:
                optimizer.apply(grads, [table, wide])

        # Only what is kept is compiled; the others show by what it has to be known, at no trace.
        taken = tf.function(step) if how is KEPT else step
        for number in range(3):
            taken(tf.constant(np.random.default_rng(number).normal(size=(4, 2)).astype(np.float32)))
        return table.numpy()

    of_keras = run(plain)
    np.testing.assert_allclose(run(KEPT), of_keras, rtol=1e-5)
    assert np.max(np.abs(run(()) - of_keras)) > 1e-3


def test_with_float16_masters():
    table = tf.Variable(tf.ones([4, 1], tf.float16))
    reference = tf.Variable(tf.ones([4, 1]))
    masters, optimizer, other = scaler.MasterWeights([table]), keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1)
    loss_scaler = scaler.LossScaler(scaler.Static(8.0), sum_duplicates=False)
    loss_scaler.scale(tf.constant(1.0))
    ids, shape = tf.constant([1, 1]), tf.constant([4, 1])
    values = tf.constant([[8.0], [16.0]], tf.float16)
    assert loss_scaler.apply(optimizer, [tf.IndexedSlices(values, ids, shape)], masters).finite
    other.apply([tf.IndexedSlices(tf.constant([[1.0], [2.0]]), ids, shape)], [reference])
    np.testing.assert_array_equal(masters.weights[0].numpy(), reference.numpy())


@pytest.mark.slow
def test_with_kerass_optimizer_and_in_its_config():
    def run(optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input([4], dtype="int32"), keras.layers.Embedding(5, 3), keras.layers.Flatten()]
        )
        model.add(keras.layers.Dense(1))
        model.compile(optimizer, loss="mse", run_eagerly=True)
        for _ in range(2):
            model.train_on_batch(np.array(IDS), np.ones([2, 1], np.float32))
        return raw(model.trainable_variables)

    optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(0.01), scaler.Static(1024.0), sum_duplicates=False)
    of_keras = run(keras.optimizers.Adam(0.01))
    assert run(optimizer) == of_keras
    assert optimizer.get_config()["sum_duplicates"] is False
    again = scaler.LossScaleOptimizer.from_config(optimizer.get_config())
    assert run(again) == of_keras
    summing = scaler.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    assert "sum_duplicates" not in summing.get_config()
    assert run(summing) != of_keras


@pytest.mark.slow
def test_on_two_replicas_they_are_those_of_both():
    strategy = mirrored(2)
    with strategy.scope():
        table, optimizer = tf.Variable(tf.ones([4, 1])), keras.optimizers.Adam(0.1)
        optimizer.build([table])
        loss_scaler = scaler.LossScaler(scaler.Static(4.0), sum_duplicates=False)

    def step(own):
        grad = tf.IndexedSlices(4.0 * own, tf.constant([2, 2]), tf.constant([4, 1]))
        loss_scaler.scale(tf.constant(1.0))
        return loss_scaler.apply(optimizer, [grad], [table]).finite

    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([[1.0], [2.0]]) * (1.0 + context.replica_id_in_sync_group)
    )
    strategy.run(tf.function(step), [values])
    reference, plain_adam = tf.Variable(tf.ones([4, 1])), keras.optimizers.Adam(0.1)
    grad = tf.IndexedSlices(tf.constant([[1.0], [2.0], [2.0], [4.0]]), tf.constant([2, 2, 2, 2]), tf.constant([4, 1]))
    plain_adam.apply([grad], [reference])
    np.testing.assert_allclose(table.numpy(), reference.numpy(), rtol=1e-6)


@pytest.mark.parametrize("wrong", ["no", 0, None])
def test_what_is_no_flag_is_refused(wrong):
    for make in (
        lambda: scaler.LossScaler(sum_duplicates=wrong),
        lambda: scaler.LossScaleOptimizer(keras.optimizers.SGD(), sum_duplicates=wrong),
    ):
        with pytest.raises(scaler.InvalidArgument, match=r"sum_duplicates=.*expected True or False"):
            make()
