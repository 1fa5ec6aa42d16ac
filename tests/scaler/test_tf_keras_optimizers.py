"""Optimizers of Keras 2 in `apply`: a class of their shape, and those of tf-keras themselves where it is installed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_two import MAKERS, Momentum
from rigs import raw
from scaler_cases import by_hand, modes_with

import scaler

MOVED = [[0.5, 1.5], [0.0, 2.0]]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def optimizer(request):
    return request.param()


def weights(kind):
    make = keras.Variable if kind == "keras" else tf.Variable
    return [make(np.ones(2, "float32")), make(np.ones(2, "float32"))]


@pytest.mark.slow_with("Momentum-xla-tensorflow")
@modes_with(("kind",), eager=[("keras",)], graph=[("masters",)], xla=[("tensorflow",)])
def test_applied_steps_move_and_skipped_ones_leave_every_bit(execute, optimizer, kind):
    own, loss_scaler = weights(kind), by_hand(scaler.Static(4.0))
    model = [tf.Variable(each.numpy(), dtype="float16") for each in own] if kind == "masters" else own
    masters = scaler.MasterWeights(model) if kind == "masters" else None
    step = execute(lambda *grads: loss_scaler.apply(optimizer, list(grads), masters or model).finite)
    good = np.float32([4.0, -4.0]), np.float32([8.0, -8.0])
    assert step(*good)
    before = raw(model, optimizer.variables, masters.weights if masters else [])
    assert not step(good[0], np.float32([np.nan, 1.0]))
    assert raw(model, optimizer.variables, masters.weights if masters else []) == before
    assert [each.numpy().tolist() for each in model] == MOVED
    assert step(*good)
    assert int(optimizer.iterations) == 2
    assert model[0].numpy().tolist() == [-0.25, 2.25]


def test_slices_of_an_embedding_are_taken(optimizer):
    table, loss_scaler = tf.Variable(tf.ones([3, 2])), by_hand(scaler.Static(4.0))
    grad = tf.IndexedSlices(tf.fill([2, 2], 4.0), tf.constant([1, 1]), tf.constant([3, 2]))
    assert loss_scaler.apply(optimizer, [grad], [table]).finite
    assert table.numpy().tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def test_an_update_that_is_not_finite_is_rolled_back():
    weight, optimizer, loss_scaler = tf.Variable([1.0]), Momentum(spoils=True), by_hand(scaler.Static(4.0))
    outcome = tf.function(lambda: loss_scaler.apply(optimizer, [tf.constant([4.0])], [weight]))()
    assert outcome.cause == scaler.Cause.UPDATE
    assert [each.numpy().tolist() for each in (weight, *optimizer.variables)] == [[1.0], 0, [0.0]]
    assert "Momentum" in loss_scaler.explain()


def test_other_variables_than_it_was_built_for_are_refused(optimizer):
    loss_scaler = by_hand(scaler.Static(4.0))
    optimizer.build([tf.Variable([1.0])])
    with pytest.raises(scaler.InvalidArgument, match="was built for other variables than 'mine:0'"):
        loss_scaler.apply(optimizer, [tf.constant([4.0])], [tf.Variable([1.0], name="mine")])


def test_a_master_is_not_decayed_where_its_variable_is_excluded():
    model = [tf.Variable([1.0], dtype="float16", name="mine")]
    optimizer, loss_scaler = Momentum(weight_decay=0.1), by_hand(scaler.Static(4.0))
    optimizer.excluded = model
    with pytest.raises(scaler.InvalidArgument, match="'mine:0' out of its weight decay"):
        loss_scaler.apply(optimizer, [tf.constant([4.0], tf.float16)], scaler.MasterWeights(model))


class Legacy:
    def apply_gradients(self, grads_and_vars):
        raise NotImplementedError


class ScalesItself(Momentum):
    def get_scaled_loss(self, loss):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("made", "sentence"),
    [(Legacy, "no legacy ones"), (ScalesItself, "ScalesItself of tf-keras scales losses by itself.*inner_optimizer")],
)
def test_what_cannot_be_taken_is_refused_with_what_can(made, sentence):
    with pytest.raises(scaler.InvalidArgument, match=sentence):
        scaler.LossScaler().apply(made(), [tf.constant(1.0)], [tf.Variable(1.0)])


def test_the_wrapper_for_compile_says_that_it_wants_one_of_keras_3():
    with pytest.raises(scaler.InvalidArgument, match=r"Keras 2, of the package tf-keras.*LossScaler\(\).apply"):
        scaler.LossScaleOptimizer(Momentum())
