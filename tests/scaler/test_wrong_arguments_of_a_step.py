"""Guards that what cannot work is refused by `apply`, `scale`, `unscale`, `snapshot` and masters, in one sentence."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import gradients_of

import scaler
from scaler.weights import KahanWeights

START = [1.0, 2.0, 3.0]


def sgd(grads, variables):
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(0.125 * grad)


def step(loss_scaler, variable, *, swapped=False, bare=False, **arguments):
    grads, variables = [gradients_of(loss_scaler, lambda: tf.reduce_sum(tf.square(variable)), variable)], [variable]
    grads, variables = (variables, grads) if swapped else (grads, variables)
    loss_scaler.apply(sgd, grads[0] if bare else grads, variables, **arguments)


WRONG = {
    "unscaled None": ({"unscaled": None}, r"unscaled=None \(NoneType\): expected True, False or a scalar bool tensor"),
    "unscaled 1": ({"unscaled": 1}, r"unscaled=1 \(int\): expected True, False"),
    "when no": ({"when": "no"}, r"when='no' \(str\): expected True, False or a scalar bool tensor"),
    "when a vector": ({"when": tf.constant([True])}, "expected True, False or a scalar bool tensor"),
    "diagnose 3": ({"diagnose": 3}, "diagnose=3.: expected a function of a scalar tensor"),
    "swapped": ({"swapped": True}, r"in the place of variables: expected a list of tf\.Variable or keras\.Variable"),
    "no list": ({"bare": True}, "the gradients are of type EagerTensor: expected a list with one for each variable"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_apply_names_what_it_was_given(wrong):
    arguments, said = WRONG[wrong]
    variable = tf.Variable(START)
    with pytest.raises(scaler.InvalidArgument, match=said):
        step(scaler.LossScaler(scaler.Dynamic(1024.0)), variable, **arguments)
    assert variable.numpy().tolist() == START


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: scaler.MasterWeights(tf.Variable(START, dtype=tf.float16)), r"MasterWeights: .* expected a list of"),
        (lambda s: scaler.MasterWeights([tf.ones([2])]), "MasterWeights: an object of type EagerTensor"),
        (lambda s: KahanWeights([tf.ones([2])]), "KahanWeights: an object of type EagerTensor"),
        (lambda s: scaler.snapshot(tf.Variable(START)), r"snapshot: an object of type .*Variable in the place"),
        (lambda s: scaler.snapshot([1]), "snapshot: an object of type int in the place of variables"),
        (lambda s: s.scale((tf.constant(1.0), {})), r"scale\(tuple\): expected a scalar, the loss alone"),
        (lambda s: s.unscale(None), "unscale: the gradients are of type NoneType: expected a list"),
        (lambda s: s.unscale(tf.ones([2])), "unscale: the gradients are of type EagerTensor: expected a list"),
    ],
)
def test_what_is_not_a_list_of_variables_or_gradients(call, said):
    with pytest.raises(scaler.InvalidArgument, match=said):
        call(scaler.LossScaler())


@pytest.mark.parametrize("false", [np.bool_(False), tf.constant(False)], ids=["numpy", "tensor"])
def test_unscaled_gradients_are_refused_however_false_is_spelled(false):
    variable, loss_scaler = tf.Variable(START), scaler.LossScaler(scaler.Dynamic(1024.0))

    @tf.function
    def traced():
        unscaled = loss_scaler.unscale(
            [gradients_of(loss_scaler, lambda: tf.reduce_sum(tf.square(variable)), variable)]
        )
        loss_scaler.apply(sgd, unscaled, [variable], unscaled=false)

    with pytest.raises(scaler.InvalidArgument, match="went through unscale already"):
        traced()
    assert variable.numpy().tolist() == START


def test_adafactor_says_why_it_cannot_train_masters():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=keras.DTypePolicy("float16"))])
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adafactor(0.1)), loss="mse")
    with pytest.raises(scaler.InvalidArgument, match=r"Adafactor gives its slots .*expected another optimizer"):
        model.fit(np.ones((2, 3), np.float16), np.ones((2, 2), np.float16), verbose=0)


OUTSIDE = r"loss_scale=.*expected a finite number in \[2\^-126, 2\^126\]"


def test_a_named_scale_that_is_none_is_refused_and_a_graph_skips():
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(scaler.Static(8.0))
    optimizer = keras.optimizers.SGD(0.1)

    def step(loss_scale):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, [weight]), [weight], loss_scale=loss_scale).finite

    traced = tf.function(step)
    with pytest.raises(scaler.InvalidArgument, match=OUTSIDE):
        traced(-8.0)
    for wrong in (-8.0, 0.0, float("inf"), float("nan"), 2.0**-127):
        for given in (wrong, tf.constant(wrong)):
            with pytest.raises(scaler.InvalidArgument, match=OUTSIDE):
                step(given)
        with pytest.raises(scaler.InvalidArgument, match="unscale: loss_scale"):
            loss_scaler.unscale([tf.constant([8.0])], loss_scale=wrong)
        assert not traced(tf.constant(wrong))
        assert "the loss_scale that it was given is no number from 2^-126 to 2^126" in loss_scaler.explain()
        assert (weight.numpy().tolist(), int(optimizer.iterations)) == ([1.0], 0)
