"""Guards what a `Part` and a `ComposedStep` refuse when they are made, or when they are traced: one sentence each."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, plain_model, squared_error

import loops
import scaler

SGD = keras.optimizers.SGD


def loss(model):
    return lambda x: tf.reduce_mean(model(x))


def part(name="one", **changes):
    model = changes.pop("model", None) or plain_model()
    arguments = {"loss_fn": loss(model), "optimizer": SGD(), **changes}
    return loops.Part(name, model, arguments.pop("loss_fn"), arguments.pop("optimizer"), **arguments)


def twice(**shared):
    return [part("one", **shared), part("two", **shared)]


PARTS = {
    "no name": ({"name": "a b"}, "Part\\(name='a b'\\): expected a name like a Python variable's"),
    "no model": ({"model": 5}, "model=5: expected a Keras model or layer, a variable, or a list"),
    "not built": ({"model": keras.Sequential([keras.layers.Dense(1)])}, "is not built"),
    "nothing to move": ({"model": keras.layers.ReLU()}, "Part 'one': its model has no trainable variables"),
    "no loss": ({"loss_fn": 5}, "Part 'one': loss_fn=5: expected a function"),
    "no optimizer": ({"optimizer": 5}, "expected a Keras optimizer"),
    "no scaler": ({"loss_scaler": 5}, "expected a scaler.LossScaler"),
    "never": ({"every": 0}, "Part 'one': every=0: expected an integer of at least 1"),
    "a norm of 0": ({"clip_norm": 0.0}, "clip_norm=0.0: expected a positive finite number"),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_part_is_refused(case):
    changes, named = PARTS[case]
    if case == "nothing to move":
        changes["model"](tf.zeros([1, 2]))
    with pytest.raises(scaler.InvalidArgument, match=named):
        part(**changes)


STEPS = {
    "no list": (lambda: (5,), {}, "expected a list of loops.Part, with at least one"),
    "an empty list": (lambda: ([],), {}, r"ComposedStep\(\[\]\): expected a list of loops.Part"),
    "a forward that is none": (lambda: ([part()], 5), {}, "forward=5.: expected a function"),
    "a name twice": (lambda: ([part(), part()],), {}, "the parts are named one, one: expected different names"),
    "a variable twice": (
        lambda: (twice(model=plain_model()),),
        {},
        "the variable 'sequential/dense/kernel' is in the parts 'one' and 'two'",
    ),
    "an optimizer twice": (
        lambda: (twice(optimizer=SGD(name="both")),),
        {},
        "the optimizer 'both' is in the parts 'one' and",
    ),
    "a scaler twice": (lambda: (twice(loss_scaler=scaler.LossScaler()),), {}, "the loss scaler 'loss_scaler' is in"),
    "windows in turns": (lambda: ([part()],), {"accumulate": 2}, "have no window in common.*forward="),
    "an optimizer that accumulates": (
        lambda: ([part(optimizer=SGD(gradient_accumulation_steps=2))],),
        {},
        "part 'one': the optimizer has gradient_accumulation_steps=2.*pass accumulate= to ComposedStep",
    ),
    "one scaler in turns": (lambda: ([part()],), {"loss_scaler": scaler.LossScaler()}, "share one forward pass"),
    "one scaler that is none": (lambda: ([part()], loss), {"loss_scaler": 5}, "expected a scaler.LossScaler"),
    "one scaler and one more": (
        lambda: ([part(loss_scaler=scaler.LossScaler())], loss),
        {"loss_scaler": scaler.LossScaler()},
        "part 'one' has a loss scaler of its own",
    ),
    "one scaler and turns": (
        lambda: ([part(every=2)], loss),
        {"loss_scaler": scaler.LossScaler()},
        "part 'one' takes its turn at some calls only",
    ),
    "a guard for all": (
        lambda: ([part()], loss),
        {
            "loss_scaler": scaler.LossScaler(
                scaler.SpikeGuard(scaler.Dynamic(), norm=False, loss=False, by_tensor="skip")
            )
        },
        "a SpikeGuard looks at the steps of one optimizer",
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_parts_that_do_not_fit_together_are_refused(case):
    make, options, named = STEPS[case]
    with pytest.raises(scaler.InvalidArgument, match=named):
        loops.ComposedStep(*make(), **options)


def test_a_part_that_gives_no_gradient_is_named():
    step = loops.ComposedStep([part(loss_fn=tf.reduce_sum)])
    with pytest.raises(scaler.InvalidArgument, match="part 'one' gives no gradient: its loss depends on none"):
        step(tf.ones([2, 4]))


def test_a_scalar_with_a_name_of_the_steps_own_is_refused():
    model = plain_model()
    step = loops.ComposedStep([part(model=model, loss_fn=lambda x: (loss(model)(x), {"applied": 1.0}))])
    with pytest.raises(loops.BadOutputs, match=r"named 'applied'.*rename it"):
        step(tf.ones([2, 4]))


def test_a_layer_that_is_frozen_later_is_refused():
    model = plain_model()
    step = loops.ComposedStep([part(model=model)])
    model.layers[0].trainable = False
    with pytest.raises(scaler.InvalidArgument, match="ComposedStep of one: frozen since it was made"):
        step(tf.ones([2, 4]))


def test_a_step_scales_by_itself_where_a_model_computes_in_float16():
    half, full = plain_model("mixed_float16"), plain_model()
    parts = [part("half", model=half), part("full", model=full)]
    scales = {name: float(one.loss_scale) for name, one in loops.ComposedStep(parts).scalers.items()}
    assert scales == {"half": 2.0**15, "full": 2.0**15}
    assert float(loops.ComposedStep([part("full", model=plain_model())]).scalers["full"].loss_scale) == 1.0


def test_variables_that_a_model_gets_after_the_step_was_made_are_put_back():
    model = plain_model()
    x, y = batch()
    steps = [
        (loops.ComposedStep([part(model=model)]), x * float("nan")),
        (loops.TrainStep(model, squared_error, SGD(), accumulate=2), (x * float("nan"), y)),
    ]
    scaler.formats.emulated("float8_e4m3fn")(model)
    for step, bad in steps:
        before = [variable.numpy() for variable in model.variables]
        for _ in range(2):
            outputs = step(bad)
        assert outputs["attempted"]
        assert not outputs["applied"]
        assert all(map(np.array_equal, before, [variable.numpy() for variable in model.variables]))
