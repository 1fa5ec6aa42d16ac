"""The fewest layers in float32: delta debugging against brute force, and what `halfstep lab cure` says about them."""

import itertools

import keras
import planted
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import loops
import scaler
from halfstep.commands.past_steps import text_of_cure
from loops.diagnose.explain.cure import find_cure, minimal

# Keras asks for the shapes of a layer's outputs, and a scale that stays too high is warned of.
pytestmark = pytest.mark.filterwarnings("ignore::scaler.ScaleWarning", "ignore:overflow encountered:RuntimeWarning")


def made(name, folder):
    getattr(planted, name)(folder).run(planted.STEPS[name])
    return folder


def hidden(run):
    """A function whose model is in a dict of another function; it names a model beside it."""
    keras.utils.set_random_seed(0)
    inside = keras.layers.Dense(
        1, name="large", use_bias=False, dtype="float16", kernel_initializer=keras.initializers.Constant(200.0)
    )
    held = {"model": keras.Sequential([keras.Input([2]), inside])}
    beside = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="beside", use_bias=False, dtype="float16")])
    optimizer, loss_scaler = keras.optimizers.SGD(1e-9), scaler.LossScaler()

    def predict(x):
        return held["model"](x)

    weights = held["model"].trainable_variables
    masters = scaler.MasterWeights(weights)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(predict(x), tf.float32))
            loss += 0.0 * tf.reduce_mean(tf.cast(beside(x / 1000.0), tf.float32))
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, weights), masters)
        return {"loss": loss, "applied": outcome.finite, "loss_scale": outcome.loss_scale}

    data = tf.data.Dataset.from_tensors(tf.fill([4, 2], 300.0)).repeat()
    actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=1)]
    return loops.Loop(step, data, actions=actions, steps_per_call=1, jit_compile=False)


@pytest.mark.dear("a cure repeats the step with one set of layers after another, each traced anew")
def test_a_model_that_the_step_does_not_name_is_cured(tmp_path):
    hidden(tmp_path).run(1)
    answer = find_cure(hidden(tmp_path), 1)
    assert answer.known
    (path,) = answer.layers
    assert path.rpartition("/")[2] == "large"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_overflow_of_the_scale_does_not_hide_what_float32_cures(tmp_path):
    """The step is finite at no scale in float16; in float32 it is, but not at its own scale."""
    run = made("small_root_under_an_overflow", tmp_path)
    answer = find_cure(planted.small_root_under_an_overflow(run), 1)
    assert (answer.layers, answer.known, answer.at_scale, answer.why) == (["root"], True, 1.0, None)
    assert text_of_cure(1, answer).splitlines()[0] == "Step 1 passes with 1 layer in float32, at a loss scale of 1:"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_layers_that_can_be_tried_are_tried_beside_one_that_cannot(tmp_path):
    """The cure is found among them."""
    answer = find_cure(planted.beside_a_stubborn(made("beside_a_stubborn", tmp_path)), 1)
    assert text_of_cure(1, answer).splitlines()[2:] == [
        '  norm: dtype="float32"',
        "",
        "Not tried, since they cannot run in float32: stubborn.",
    ]


@given(st.integers(1, 9), st.lists(st.frozensets(st.integers(0, 8), max_size=3), max_size=3))
def test_none_of_its_items_can_be_left_out(count, causes):
    """Passing needs one item of each cause; a cause without items can never be met."""
    items = [f"layer {place}" for place in range(count)]
    asked = []

    def passes(chosen):
        asked.append(tuple(chosen))
        return all({items.index(one) for one in chosen} & cause for cause in causes)

    found = minimal(items, passes)
    possible = [
        list(chosen)
        for size in range(count + 1)
        for chosen in itertools.combinations(items, size)
        if all({items.index(one) for one in chosen} & cause for cause in causes)
    ]
    assert len(asked) == len(set(asked))
    if not possible:
        assert found is None
        return
    assert found in possible
    assert not any([other for other in found if other != one] in possible for one in found)


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {2, 5, 6}, set(range(8))], ids=str)
def test_what_is_needed_together_is_found(needed):
    """Nothing passes but a set with all of them."""
    assert minimal(range(8), lambda chosen: needed <= set(chosen)) == sorted(needed)


def test_nothing_is_needed():
    """A step that passes as it is needs no layer."""
    assert minimal(["a", "b"], lambda chosen: True) == []


@pytest.mark.slow
def test_layers_whose_loss_is_absurd_are_said_to_be_no_help(tmp_path):
    """A learning rate of 1e5 makes weights of which float16 overflows, and float32 gives a loss of millions."""

    def program(resume):
        keras.utils.set_random_seed(0)
        narrow = keras.layers.Dense(16, activation="relu", use_bias=False, name="narrow", dtype="mixed_float16")
        last = keras.layers.Dense(2, use_bias=False, dtype="float32")
        model = keras.Sequential([keras.Input((8,)), narrow, last])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        x = tf.random.stateless_normal([64, 8], seed=[0, 1])
        data = tf.data.Dataset.from_tensor_slices((x, tf.cast(x[:, 0] > 0, tf.int32))).batch(32).repeat()
        step = loops.TrainStep(model, loss, keras.optimizers.SGD(1e5), loss_scaler=scaler.LossScaler())
        actions = [
            loops.JsonLines(tmp_path / "steps.jsonl"),
            loops.Checkpoint(tmp_path / "ckpt", every=5, resume=resume),
        ]
        return loops.Loop(step, data, steps_per_call=1, actions=actions, jit_compile=False)

    program(False).run(2)
    found = find_cure(program(True), 2)
    assert found.layers == ["narrow"]
    assert "times the loss of the steps before" in found.no_help
    assert f"That is no help: {found.no_help}." in text_of_cure(2, found)
