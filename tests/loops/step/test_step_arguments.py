"""Guards what a TrainStep refuses when it is made: what would otherwise fail in a trace, or go wrong in silence."""

import keras
import pytest
import tensorflow as tf
from models import squared_error

import loops
import scaler


def model():
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(4, name="near"), keras.layers.Dense(1, name="far")])


def rescaled():
    return scaler.layerwise.insert_rescales(model(), after=["near"])[0]


SGD = keras.optimizers.SGD
REFUSED = {
    "no optimizer": ({"optimizer": 5}, "TrainStep: optimizer=5: expected a Keras optimizer"),
    "an unknown name": ({"optimizer": "adamm"}, "TrainStep: optimizer='adamm': expected a Keras optimizer"),
    "a name that needs more": ({"optimizer": "lossscaleoptimizer"}, "the name of one such as 'adam'"),
    "a class": ({"optimizer": SGD}, "expected a Keras optimizer such as"),
    "an optimizer that scales": ({"optimizer": keras.optimizers.LossScaleOptimizer(SGD())}, "inner_optimizer"),
    "one that accumulates": ({"optimizer": SGD(gradient_accumulation_steps=3)}, "pass accumulate="),
    "a norm of 0": ({"clip_norm": 0.0}, "clip_norm=0.0: expected a positive finite number"),
    "no clipping": ({"clip": 1.0}, "expected scaler.ClipByNorm"),
    "two clippings": ({"clip": scaler.ClipByNorm(1.0), "clip_norm": 1.0}, "expected one of them"),
    "attempts of another scaler": (
        {"optimizer": SGD(loops.ByAttempts(lambda step: 0.1, scaler.LossScaler(scaler.Static(2.0))))},
        "another loss scaler",
    ),
    "rescales without their Layerwise": ({"model": rescaled()}, "expected layerwise="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_it_is_made(case):
    changes, named = REFUSED[case]
    arguments = {"model": model(), "loss_fn": squared_error, "optimizer": SGD(), **changes}
    with pytest.raises(scaler.InvalidArgument, match=named) as caught:
        loops.TrainStep(arguments.pop("model"), arguments.pop("loss_fn"), arguments.pop("optimizer"), **arguments)
    assert "in user code" not in str(caught.value)


@pytest.mark.parametrize("name", ["adam", "SGD"])
def test_the_name_of_an_optimizer_is_taken_as_by_compile(name):
    step, compiled = loops.TrainStep(model(), squared_error, name), model()
    compiled.compile(name)
    assert type(step.optimizer) is type(compiled.optimizer)
    ours, theirs = step.optimizer.get_config(), compiled.optimizer.get_config()
    assert ours | {"name": ""} == theirs | {"name": ""}
    parts = [loops.Part(one, model(), squared_error, name) for one in ("first", "second")]
    assert isinstance(parts[0].optimizer, keras.optimizers.Optimizer)
    # Each gets one of its own.
    assert loops.ComposedStep(parts).optimizers["second"] is not parts[0].optimizer
    with pytest.raises(scaler.InvalidArgument, match="Part 'first': optimizer=None: expected a Keras optimizer"):
        loops.Part("first", model(), squared_error, None)


def test_attempts_of_its_own_scaler_are_taken():
    loss_scaler = scaler.LossScaler(scaler.Static(2.0))
    optimizer = SGD(loops.ByAttempts(lambda step: 0.1, loss_scaler))
    assert loops.TrainStep(model(), squared_error, optimizer, loss_scaler=loss_scaler).loss_scaler is loss_scaler


def of_labels(y, prediction):
    return tf.reduce_mean(y)


def stopped(y, prediction):
    return tf.reduce_mean(tf.stop_gradient(prediction) - y)


def counted(y, prediction):
    return tf.reduce_mean(tf.cast(tf.argmax(prediction, -1), tf.float32))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"retry": True}, {"accumulate": 2}], ids=["plain", "retry", "accumulate"])
@pytest.mark.parametrize("loss_fn", [of_labels, stopped, counted])
def test_a_loss_that_depends_on_no_weight_is_told_in_words_of_a_train_step(loss_fn, options, compiled):
    """Its user has no tape and calls no `scale`."""
    step = loops.TrainStep(model(), loss_fn, SGD(), loss_scaler=scaler.LossScaler(scaler.Dynamic()), **options)
    with pytest.raises(scaler.InvalidArgument) as caught:
        (tf.function(step) if compiled else step)((tf.ones([2, 3]), tf.ones([2, 1])))
    said = str(caught.value)
    assert said.startswith("TrainStep: the loss gives no gradient: it depends on none of the trainable variables of")
    assert "tf.stop_gradient, NumPy, tf.argmax" in said
    assert "do not freeze the layers" in said
    assert "tape" not in said


def test_a_frozen_way_of_the_loss_and_groups_with_scales_of_their_own_are_told_too():
    told = "TrainStep: the loss gives no gradient"
    frozen, other = keras.layers.Dense(1, trainable=False), keras.layers.Dense(1)
    inputs = keras.Input([3])
    two = keras.Model(inputs, [frozen(inputs), other(inputs)])
    step = loops.TrainStep(two, lambda y, prediction: squared_error(y, prediction[0]), SGD())
    with pytest.raises(scaler.InvalidArgument, match=told):
        step((tf.ones([2, 3]), tf.ones([2, 1])))
    grouped, groups = scaler.layerwise.insert_rescales(model(), after=["near"])
    step = loops.TrainStep(grouped, of_labels, SGD(), layerwise=groups)
    with pytest.raises(scaler.InvalidArgument, match=told):
        step((tf.ones([2, 3]), tf.ones([2, 1])))
