"""Guards `cure(format=...)`: which layers may be in a format at a past step, by the step's own gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from halfstep.commands.past_steps import text_of_format
from loops.diagnose.explain.cure_in_format import FormatCure, PartInFormat, find_format_cure
from loops.observe import cure
from loops.support.errors import LoopError

FP8 = "float8_e4m3fn"


def of(build, run):
    """A loop whose run wrote its log and checkpoints, and one before its first step."""
    build(run).run(4)
    return build(run)


def data(batches=8):
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal([8 * batches, 64]).astype(np.float32), rng.integers(0, 4, 8 * batches)
    images[:, 0] = 0.0
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)


def model_of(policy="mixed_float16"):
    """The first layer has a weight that is large and of an input that is always zero: it takes the scale from all."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(16, activation="tanh", name="first", dtype=policy),
        keras.layers.Dense(16, activation="tanh", name="second", dtype=policy),
        keras.layers.Dense(4, name="third", dtype="float32"),
    ]
    model = keras.Sequential([keras.Input([64]), *layers])
    kernel = layers[0].kernel.numpy()
    kernel[0] = 1e6
    layers[0].kernel.assign(kernel)
    return model


def by_step(run, scale=2.0**15, dataset=None):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(scale))
    step = loops.TrainStep(model_of(), loss, keras.optimizers.SGD(1e-3), loss_scaler=loss_scaler)
    actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)]
    return loops.Loop(step, data() if dataset is None else dataset, actions=actions, jit_compile=False)


def reference(inside):
    """The gradients of the fourth batch's loss at a rate of nearly nothing, by a model of its own."""
    model = model_of("float32")
    if inside:
        scaler.formats.emulated(FP8, scaling="current")(model, only=inside)
    found = []
    for x, y in data().take(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        found.append(np.concatenate([np.ravel(one) for one in tape.gradient(loss, model.trainable_variables)]))
    return found


@pytest.mark.exhaustive
def test_the_layer_whose_weights_are_flushed_is_left_out(tmp_path):
    loop = of(by_step, tmp_path)
    before = [variable.numpy() for variable in loop.train_step.model.variables]
    found = find_format_cure(loop, 4, FP8)
    assert (found.left_out, found.inside) == (["first"], ["second", "third"])
    assert found.alone["first"] > found.limit == min(found.noise, 0.5) >= found.error
    # The weights have hardly moved since the start.
    batches = reference([])
    norm = np.linalg.norm(batches[3])
    for path in ("second", "third"):
        assert found.alone[path] == pytest.approx(np.linalg.norm(reference([path])[3] - batches[3]) / norm, rel=0.2)
    spread = np.sqrt(sum(np.linalg.norm(one - np.mean(batches, 0)) ** 2 for one in batches) / (len(batches) - 1))
    assert found.noise == pytest.approx(spread / norm, rel=0.1)
    model = loop.train_step.model
    assert not any("call" in vars(layer) for layer in model.layers)
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float16", "float32"]
    assert len(before) == len(model.variables)


def test_the_text_for_all_and_for_none(snapshot):
    found = FormatCure("mxfp4", [], ["a", "b"], 0.123, 0.4, 0.4, {"a": 0.1, "b": 0.1})
    assert text_of_format(3, found) == snapshot
    found = FormatCure("mxfp4", ["a"], [], 0.0, 1.1, 0.5, {"a": 0.6})
    assert text_of_format(3, found).startswith("Step 3: no layer may be in mxfp4. Alone each moves")


def test_the_text_says_whether_a_layer_may_be_in_alone_and_of_which_part(snapshot):
    found = FormatCure("mxfp4", ["a", "b"], ["c"], 0.1, 0.4, 0.4, {"a": 0.3, "b": 0.6, "c": 0.1}, may_alone=["a"])
    lines = text_of_format(3, found).splitlines()
    assert lines[4:6] == ["  a  30.0%; alone it may be", "  b  60.0%"]
    parts = {
        "one": PartInFormat(0.1, 0.4, 0.4, {"m/a": 0.3, "n/b": 0.0}),
        "two": PartInFormat(0.0, 1.2, 0.5, {"m/a": 0.6, "n/b": 0.0}),
    }
    found = FormatCure(
        "mxfp4",
        ["m/a"],
        ["n/b"],
        0.1,
        0.4,
        0.4,
        {"m/a": 0.6, "n/b": 0.0},
        parts=parts,
        not_tried={"o/d": "Step 3 does not call it."},
        models=["m", "n", "o"],
    )
    assert text_of_format(3, found) == snapshot


@pytest.mark.exhaustive
def test_what_cannot_be_compared_is_refused(tmp_path):
    with pytest.raises(scaler.InvalidArgument, match="expected one of float32"):
        cure(by_step(tmp_path), 1, format="float9")
    one = tmp_path / "one"
    short = data().take(1)
    by_step(one, dataset=short).run(1)
    with pytest.raises(LoopError, match="a second one of the same shapes"):
        cure(by_step(one, dataset=short), 1, format=FP8)


def by_penalty(run):
    """A step whose inner gradients, of a penalty, are unscaled as well."""
    model, optimizer, loss_scaler = model_of("float32"), keras.optimizers.SGD(1e-3), scaler.LossScaler()

    def step(x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                own = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
                first = loss_scaler.scale(own)
            (slopes,) = loss_scaler.unscale([inner.gradient(first, x)])
            scaled = loss_scaler.scale(own + 0.0 * tf.reduce_sum(slopes))
        weights = model.trainable_variables
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights)
        return {"loss": own, "applied": outcome.finite}

    actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)]
    return loops.Loop(step, data(), actions=actions)


@pytest.mark.exhaustive
def test_what_a_penalty_unscales_is_no_gradient_of_the_weights(tmp_path):
    found = find_format_cure(of(by_penalty, tmp_path), 4, FP8)
    batches = reference([])
    norm = np.linalg.norm(batches[3])
    for path in ("second", "third"):
        assert found.alone[path] == pytest.approx(np.linalg.norm(reference([path])[3] - batches[3]) / norm, rel=0.2)
