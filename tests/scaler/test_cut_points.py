"""Guards where a Keras model is cut: branches, residual blocks and shared layers, and a clear refusal of the rest."""

import functools

import keras
import layerwise_cases as cases
import numpy as np
import pytest
import tensorflow as tf

import scaler

layers = keras.layers


def towers():
    """Two towers, one with a residual block, a shared layer behind both, and a second output."""
    keras.utils.set_random_seed(2)
    left, right = keras.Input([8], name="left"), keras.Input([8], name="right")
    flat = layers.Flatten(name="flat")(left)
    stem = layers.Dense(8, activation="tanh", name="stem")(flat)
    inner = layers.Dense(8, activation="tanh", name="inner")(stem)
    block = layers.Add(name="block")([stem, inner])
    tower = layers.Dense(8, activation="tanh", name="tower")(layers.Concatenate(name="both")([right, flat]))
    shared = layers.Dense(4, name="shared")
    joined = layers.Add(name="joined")([shared(block), shared(tower)])
    first = layers.Dense(1, name="first")(layers.Activation("tanh", name="bend")(joined))
    return keras.Model([left, right], {"first": first, "second": layers.Dense(1, name="second")(joined)})


def gradients(model, layerwise=None):
    x = [cases.batch(seed)[0] for seed in (0, 1)]
    with tf.GradientTape() as tape:
        outputs = model(x)
        loss = tf.reduce_mean(tf.square(outputs["first"] - 1.0)) + tf.reduce_mean(tf.square(outputs["second"]))
    if layerwise is None:
        return tape.gradient(loss, model.trainable_variables)
    return layerwise.gradient(tape, loss, model.trainable_variables)


def test_branches_a_shared_layer_and_two_outputs_get_exact_gradients():
    model = towers()
    rescaled, layerwise = scaler.layerwise.insert_rescales(model, ["stem", "joined", "tower", "block"])
    assert layerwise.names[:2] == ("outputs", "joined")
    parents = {
        name: layerwise.names[parent]
        for name, parent in zip(layerwise.names, layerwise._groups.parents, strict=True)
        if parent >= 0
    }
    assert parents == {"joined": "outputs", "block": "joined", "tower": "joined", "stem": "block"}
    # Another scale for each group; in float32 powers of two change no bit.
    exponents = {"outputs": 3, "joined": -5, "block": 20, "tower": -11, "stem": 40}
    layerwise._scales["*"]._state["loss_scale"].assign([2.0 ** exponents[name] for name in layerwise.names])
    found, seen = gradients(rescaled, layerwise)
    wanted = dict(zip(map(id, model.trainable_variables), gradients(model), strict=True))
    for one, variable in zip(found, rescaled.trainable_variables, strict=True):
        assert one.numpy().tobytes() == wanted[id(variable)].numpy().tobytes(), variable.path
    assert seen.observed.numpy().all()
    assert seen.finite.numpy().all()
    amax = max(float(tf.reduce_max(tf.abs(grad))) for grad in found)
    assert seen.amax.numpy().max() >= amax


def test_the_new_model_predicts_the_same_and_shares_its_weights():
    model = towers()
    rescaled, _ = scaler.layerwise.insert_rescales(model, ["joined"])
    x = [cases.batch(seed)[0] for seed in (0, 1)]
    for name, prediction in rescaled(x).items():
        np.testing.assert_array_equal(prediction, model(x)[name])
    assert {id(v) for v in rescaled.variables} == {id(v) for v in model.variables}


def two_layers():
    return keras.Sequential([keras.Input([8]), layers.Dense(4, name="one"), layers.Dense(1, name="two")])


def test_a_sequential_model_and_one_name():
    model = two_layers()
    rescaled, layerwise = scaler.layerwise.insert_rescales(model, "one")
    assert layerwise.names == ("outputs", "one")
    x, y = cases.batch()
    for owner, names in (("outputs", {"two"}), ("one", {"one"})):
        layerwise._scales["*"]._state["loss_scale"].assign(
            [2.0**9 if name == owner else 1.0 for name in layerwise.names]
        )
        with tf.GradientTape() as tape:
            loss = cases.loss_of(rescaled, x, y)
        raw = tape.gradient(loss, rescaled.trainable_variables)
        with tf.GradientTape() as tape:
            plain = cases.loss_of(model, x, y)
        wanted = tape.gradient(plain, rescaled.trainable_variables)
        for variable, grad, want in zip(rescaled.trainable_variables, raw, wanted, strict=True):
            factor = 2.0**9 if variable.path.split("/")[-2] in names else 1.0
            np.testing.assert_array_equal(grad, want * factor)


refused_towers = functools.cache(towers)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (["inner"], "'stem', which comes before, also goes to layer 'block'"),
        (["first"], "also goes to layer 'second'"),
        (["shared"], "called several times"),
        (["bend"], "also goes to layer 'second'"),
        (["missing"], "expected names of layers"),
        (["stem", "stem"], "each once"),
        ([], "at least one layer"),
        (3, "expected a list of names of layers"),
        ([3], "expected a list of names of layers"),
    ],
)
def test_what_is_no_cut_point_is_refused_by_name(after, words):
    with pytest.raises(scaler.InvalidArgument, match=words):
        scaler.layerwise.insert_rescales(refused_towers(), after)


def test_a_shared_layer_on_both_sides_of_a_cut_is_refused():
    twice = layers.Dense(8, name="twice")
    inputs = keras.Input([8])
    middle = layers.Activation("tanh", name="middle")(twice(inputs))
    model = keras.Model(inputs, twice(middle))
    with pytest.raises(scaler.InvalidArgument, match="group 'middle' by layer 'twice' and in 'outputs' by layer"):
        scaler.layerwise.insert_rescales(model, ["middle"])


def test_losses_that_would_come_by_no_rescale_are_refused():
    for options in ({"kernel_regularizer": "l2"}, {"activity_regularizer": "l2"}):
        inputs = keras.Input([8])
        hidden = layers.Dense(4, name="hidden", **options)(inputs)
        with pytest.raises(scaler.InvalidArgument, match="weight decay"):
            scaler.layerwise.insert_rescales(keras.Model(inputs, layers.Dense(1)(hidden)), ["hidden"])


def test_models_whose_graph_is_not_known_are_refused():
    class Own(keras.Model):
        def call(self, x):
            return x

    for model, words in (
        (Own(), "subclassed"),
        (keras.Sequential([layers.Dense(1)]), "not built"),
        ("model", "expected a keras.Sequential"),
    ):
        with pytest.raises(scaler.InvalidArgument, match=words):
            scaler.layerwise.insert_rescales(model, ["one"])


def test_frozen_layers_may_be_thawed_later():
    model = two_layers()
    model.layers[0].trainable = False
    rescaled, layerwise = scaler.layerwise.insert_rescales(model, ["one"])
    x, y = cases.batch()
    for trainable, count in ((False, 2), (True, 4)):
        model.layers[0].trainable = trainable
        with tf.GradientTape() as tape:
            loss = cases.loss_of(rescaled, x, y)
        grads, _ = layerwise.gradient(tape, loss, rescaled.trainable_variables)
        assert len([grad for grad in grads if grad is not None]) == count


@pytest.mark.parametrize("protect", [False, True])
def test_fit_takes_no_rescaled_model_whose_scales_it_would_leave_in_the_gradients(protect):
    rescaled, _ = scaler.layerwise.insert_rescales(two_layers(), ["one"])
    rescaled.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss="mse", run_eagerly=True)
    if protect:
        scaler.protect(rescaled)
    with pytest.raises(scaler.InvalidArgument, match=r"fit: model .* whose scales nothing removes"):
        rescaled.fit(np.ones([4, 8]), np.ones([4, 1]), verbose=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_by_hand_does_not_apply_what_still_carries_the_scales_of_groups(compiled):
    rescaled, layerwise = scaler.layerwise.insert_rescales(two_layers(), ["one"])
    variables, loss_scaler, sgd = rescaled.trainable_variables, scaler.LossScaler(), keras.optimizers.SGD(0.01)
    before = [variable.numpy() for variable in variables]

    def step(removed):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_mean(rescaled(tf.ones([4, 8]))))
        grads = layerwise.gradient(tape, scaled, variables)[0] if removed else tape.gradient(scaled, variables)
        return loss_scaler.apply(sgd, grads, variables, loss_scale=loss_scaler.loss_scale).finite

    call = tf.function(step) if compiled else step
    with pytest.raises(scaler.InvalidArgument, match=r"passed a rescale, .* layerwise\.gradient\(tape"):
        call(False)
    assert all((one.numpy() == then).all() for one, then in zip(variables, before, strict=True))
    assert (call.get_concrete_function if compiled else call)(True)
