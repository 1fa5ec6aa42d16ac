"""A loss moves the weights on 2 replicas as on one device, however it is given: nothing divides it twice.

Guards against half a step: Keras's and TensorFlow's losses divide by the number of replicas, and so does a step.
"""

import functools
import warnings

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from mirrored import mirrored

import loops
import scaler
from loops.backend import replica_losses

MSE = keras.losses.MeanSquaredError()
SUM = keras.losses.MeanSquaredError(reduction="sum")
X, Y = tf.random.stateless_normal([8, 4], (0, 1)), tf.random.stateless_normal([8, 1], (0, 2))


class OfExamples(keras.losses.Loss):
    def call(self, y, prediction):
        return tf.reduce_mean(tf.square(y - prediction), -1)


class AlreadyMean(keras.losses.Loss):
    """Keras does not divide what has no examples any more."""

    def call(self, y, prediction):
        return tf.reduce_mean(tf.square(y - prediction))


class Callable:
    def __call__(self, y, prediction):
        return MSE(y, prediction)

    def method(self, y, prediction):
        return MSE(y, prediction)


class AsksAndAdds(keras.layers.Layer):
    """Has a loss of its own, and a use for the true number of replicas."""

    def __init__(self):
        super().__init__()
        self.replicas = tf.distribute.get_strategy().num_replicas_in_sync

    def call(self, inputs):
        self.add_loss(0.1 * MSE(tf.zeros_like(inputs), inputs))
        return inputs * float(tf.distribute.get_strategy().num_replicas_in_sync == self.replicas)


def branches(y, prediction):
    if tf.size(y) > 0:
        return MSE(y, prediction)
    return 0.0


def loops_over(y, prediction):
    total = tf.constant(0.0)
    for _ in tf.range(2):
        total += MSE(y, prediction)
    return total


def weights_penalised(y, prediction):
    return MSE(y, prediction) + tf.nn.scale_regularization_loss(tf.reduce_mean(prediction))


def mean_of(losses, y, prediction):
    return tf.reduce_mean(losses(y, prediction))


def averaged(y, prediction):
    return tf.nn.compute_average_loss(keras.losses.mean_squared_error(y, prediction))


TRACED_BEFORE = tf.function(Callable())
WAYS = {
    "function": lambda y, prediction: MSE(y, prediction),
    "callable object": Callable(),
    "bound method": Callable().method,
    "sum with a function": lambda y, prediction: MSE(y, prediction) + 0.5 * tf.reduce_mean(tf.abs(y - prediction)),
    "own class": lambda y, prediction: OfExamples()(y, prediction) + AlreadyMean()(y, prediction),
    "no reduction": functools.partial(mean_of, keras.losses.MeanSquaredError(reduction=None)),
    "Keras's function": functools.partial(mean_of, keras.losses.mean_squared_error),
    "average of TensorFlow": averaged,
    "penalty of TensorFlow": weights_penalised,
    "branch": branches,
    "loop": loops_over,
    "recomputed": tf.recompute_grad(lambda y, prediction: MSE(y, prediction)),
    "tf.function": tf.function(Callable()),
    "tf.function traced before": TRACED_BEFORE,
}


def heads(count):
    """A model with an output for each loss, whose weights show what that loss did."""
    inputs, start = keras.Input([4]), {"kernel_initializer": "ones", "use_bias": False}
    outputs = [keras.layers.Dense(1, name=f"head_{i}", **start)(inputs) for i in range(count)]
    return keras.Model(inputs, outputs)


def call(strategy, function):
    """Calls a function of `x` and `y` with each replica's share."""

    def share(values):
        return lambda context: tf.split(values, 2)[context.replica_id_in_sync_group]

    parts = [strategy.experimental_distribute_values_from_function(share(values)) for values in (X, Y)]
    return strategy.run(function, parts)


def moved(strategy, make, eager):
    """The weights before and after two calls of a step that `make` makes with its model."""
    with strategy.scope():
        step, model = make()
    start = [variable.numpy() for variable in model.weights]

    def once():
        return call(strategy, lambda x, y: step((x, y))) if strategy.num_replicas_in_sync > 1 else step((X, Y))

    once = once if eager else tf.function(once)
    once()
    once()
    return start, [variable.numpy() for variable in model.weights]


def check(make, eager=False):
    (start, one), (_, two) = (
        moved(tf.distribute.get_strategy(), make, eager=True),
        moved(cases.mirrored(2), make, eager),
    )
    for number, (before, ours, theirs) in enumerate(zip(start, two, one, strict=True)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=f"weight {number}")
        assert not np.array_equal(theirs, before), number


def step_of(model, loss_fn, **arguments):
    loss_scaler = scaler.LossScaler(scaler.Dynamic(16.0))
    return loops.TrainStep(model, loss_fn, keras.optimizers.SGD(0.1), loss_scaler=loss_scaler, **arguments), model


def sum_of(ways, **arguments):
    def loss_fn(y, predictions):
        losses = [WAYS[way](y, one) for way, one in zip(ways, predictions, strict=True)]
        return tf.add_n(losses), {f"of {way}": loss for way, loss in zip(ways, losses, strict=True)}

    return step_of(heads(len(ways)), loss_fn, **arguments)


def test_a_function_around_losses():
    check(functools.partial(sum_of, ["function", "sum with a function", "own class"]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["graph", "eager", "accumulate"])
def test_every_function_around_losses(how):
    strategy, outside = cases.mirrored(2), []
    ways = list(WAYS) if how == "graph" else ["branch", "own class", "tf.function"]
    make = functools.partial(sum_of, ways, accumulate=1 + (how == "accumulate"))
    call(strategy, lambda x, y: outside.append(TRACED_BEFORE(y, x[:, :1])))
    check(make, eager=how == "eager")
    call(strategy, lambda x, y: outside.append(WAYS["tf.function"](y, x[:, :1])))
    # Outside of a step a loss is what Keras makes it.
    np.testing.assert_array_equal(outside[:2], outside[2:])
    np.testing.assert_allclose(outside[0], tf.reduce_mean(tf.square(Y[:4] - X[:4, :1])) / 2, rtol=1e-6)


def test_a_loss_for_each_output():
    losses = {"head_0": MSE, "head_1": SUM, "head_2": AlreadyMean()}

    def make():
        step, model = step_of(heads(3), losses)
        return lambda batch: step((batch[0], dict.fromkeys(losses, batch[1]))), model

    check(make)


def penalised(strategy):
    """A model with losses of its own, that normalises over the whole batch wherever it is."""

    def penalty(weights):
        return 0.1 * MSE(tf.zeros_like(weights), weights)

    norm = keras.layers.BatchNormalization(synchronized=strategy.num_replicas_in_sync > 1)
    start = keras.initializers.RandomNormal(seed=1)
    dense = keras.layers.Dense(3, kernel_initializer=start, kernel_regularizer=penalty, use_bias=False)
    return keras.Sequential(
        [keras.Input([4]), dense, norm, AsksAndAdds(), keras.layers.Dense(1, "tanh", kernel_initializer=start)]
    )


@pytest.mark.slow
def test_own_losses_of_a_model():
    check(lambda: step_of(penalised(tf.distribute.get_strategy()), MSE))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["together", "loss in forward"])
def test_parts(how):
    def make():
        first_layer = keras.layers.Dense(3, kernel_initializer="ones", use_bias=False)
        last_layer = keras.layers.Dense(1, "tanh", kernel_initializer=keras.initializers.RandomNormal(seed=1))
        model = keras.Sequential([keras.Input([4]), first_layer, AsksAndAdds(), last_layer])
        critic = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, kernel_initializer="ones")])

        def forward(batch):
            prediction = model(batch[0], training=True)
            if how == "loss in forward":
                return MSE(batch[1], prediction), averaged(batch[1], critic(batch[0]))
            return batch, prediction

        def first(given):
            return given[0] if how == "loss in forward" else MSE(given[0][1], given[1])

        def second(given):
            return given[1] if how == "loss in forward" else averaged(given[0][1], critic(given[0][0]))

        parts = [
            loops.Part("first", model, first, keras.optimizers.SGD(0.1)),
            loops.Part("second", critic, second, keras.optimizers.SGD(0.1)),
        ]
        return loops.ComposedStep(parts, forward), keras.Model(
            critic.inputs, [model(critic.inputs[0]), *critic.outputs]
        )

    check(make)


def by_hand(y, prediction):
    return tf.reduce_mean(tf.square(y - prediction)) / tf.distribute.get_strategy().num_replicas_in_sync


def by_hand_in_a_context(y, prediction):
    return tf.reduce_mean(tf.square(y - prediction)) / tf.distribute.get_replica_context().num_replicas_in_sync


def sum_by_hand(y, prediction):
    return SUM(y, prediction) / 8.0


def average_by_hand(y, prediction):
    return tf.nn.compute_average_loss(keras.losses.mean_squared_error(y, prediction), global_batch_size=8)


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (by_hand, "asks for num_replicas_in_sync.*do not divide by it"),
        (by_hand_in_a_context, "asks for num_replicas_in_sync.*do not divide by it"),
        (tf.function(by_hand), "asks for num_replicas_in_sync.*do not divide by it"),
        (sum_by_hand, "reduction='sum'.*pass this Keras loss itself"),
        (average_by_hand, "global_batch_size.*leave it out"),
    ],
)
def test_divided_by_hand(loss_fn, said):
    strategy = cases.mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        step, _ = step_of(model, loss_fn)
        part = loops.Part("part", model, lambda batch: loss_fn(batch[1], model(batch[0])), keras.optimizers.SGD(0.1))
        composed = loops.ComposedStep([part])
    for one in (step, composed):
        with pytest.raises(scaler.InvalidArgument, match=f"a loss function .*{said}"):
            tf.function(call)(strategy, lambda x, y, one=one: one((x, y)))
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    step_of(model, loss_fn)[0]((X, Y))  # On one device it means what it says.


def test_another_keras_is_refused_before_a_weight_moves(monkeypatch):
    monkeypatch.delattr("keras.src.losses.loss.reduce_values")
    with pytest.raises(scaler.UnsupportedVersion, match="divides losses by the number of replicas elsewhere"):
        replica_losses._prepare.__wrapped__()


TOLD = {
    "a mean": (lambda y, p: tf.reduce_mean((y - p) ** 2), True),
    "two means": (lambda y, p: tf.reduce_mean((y - p) ** 2) + tf.reduce_mean(tf.abs(p)), True),
    "a mean of what was divided": (lambda y, p: tf.reduce_mean((y - p) ** 2 / 2.0), False),
    "a mean of losses of Keras": (lambda y, p: tf.reduce_mean([keras.losses.MeanSquaredError()(y, p)]), False),
    "a mean, divided": (lambda y, p: tf.reduce_mean((y - p) ** 2) / 2.0, False),
    "a sum over the global batch": (lambda y, p: tf.reduce_sum((y - p) ** 2) / 8.0, False),
    "a loss of Keras": (lambda y, p: keras.losses.MeanSquaredError()(y, p), False),
}


def said_of(step):
    """What is said while a step is traced on two replicas."""
    batch = tf.ones((8, 4)), tf.ones((8, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tf.function(lambda: mirrored(2).run(step, (batch,))).get_concrete_function()
    return [str(one.message) for one in caught if issubclass(one.category, scaler.ScaleWarning)]


@pytest.mark.parametrize("way", TOLD)
def test_a_mean_that_nothing_divides_is_told(way, snapshot):
    """By the optimizer of Keras that a step of `fit` uses, whose gradients are added."""
    loss_fn, told = TOLD[way]
    with mirrored(2).scope():
        weight, optimizer = tf.Variable(1.0), scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build([weight])
    said = said_of(lambda batch: optimizer.scale_loss(loss_fn(batch[1], batch[0] * weight)))
    assert len(said) == told
    assert not told or said == snapshot


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda y, p: tf.reduce_sum((y - p) ** 2), True),
        (lambda y, p: tf.reduce_sum(tf.reduce_mean((y - p) ** 2, 0)), False),
    ],
    ids=["a sum", "a sum of means"],
)
def test_a_step_that_divides_tells_of_a_sum(loss, told, snapshot):
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        step = loops.TrainStep(model, loss, keras.optimizers.SGD(0.1))
    said = said_of(step)
    assert len(said) == told
    assert not told or said == snapshot
