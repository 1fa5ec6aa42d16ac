"""Guards `cure(format=...)` of steps with several scalers, with turns, and of steps that do not name their model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from halfstep.commands.past_steps import text_of_format
from loops.diagnose.explain.cure_in_format import find_format_cure
from loops.support.errors import LoopError

pytestmark = pytest.mark.slow
FP8 = "float8_e4m3fn"


def dense(units, name):
    return keras.layers.Dense(units, activation="tanh", name=name)


def models():
    keras.utils.set_random_seed(0)
    generator = keras.Sequential([keras.Input([8]), dense(8, "g_in"), dense(8, "g_out")], name="generator")
    critic = keras.Sequential([keras.Input([8]), dense(8, "c_in"), dense(1, "c_out")], name="critic")
    return generator, critic


def batches(count=8):
    return np.random.default_rng(0).normal(size=[count, 16, 8]).astype(np.float32)


def losses(generator, critic, weight=1.0):
    def of_critic(batch):
        return weight * tf.reduce_mean((critic(batch) - 1.0) ** 2 + critic(generator(batch)) ** 2)

    def of_generator(batch):
        return tf.reduce_mean((critic(generator(batch)) - 1.0) ** 2)

    return of_critic, of_generator


def actions(run):
    return [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "checkpoints", every=2, resume=True)]


def in_turns(run, every=3, weight=1.0):
    generator, critic = models()
    of_critic, of_generator = losses(generator, critic, weight)
    parts = [
        loops.Part("critic", critic, of_critic, keras.optimizers.SGD(0.01)),
        loops.Part("generator", generator, of_generator, keras.optimizers.SGD(0.01), every=every),
    ]
    data = tf.data.Dataset.from_tensor_slices(batches())
    return loops.Loop(loops.ComposedStep(parts), data, actions=actions(run))


def of(build, run, steps=7):
    build(run).run(steps)
    return build(run)


@pytest.mark.exhaustive
def test_a_part_without_its_turn_is_neither_in_nor_out(tmp_path):
    step, when = 2, "at step 3 it has it first"
    found = find_format_cure(of(in_turns, tmp_path), step, FP8)
    generators = ["generator/g_in", "generator/g_out"]
    assert list(found.not_tried) == generators
    for why in found.not_tried.values():
        assert why == f"Part 'generator' does not have its turn at step {step}: {when}."
    assert sorted(found.inside + found.left_out) == sorted(found.alone) == ["critic/c_in", "critic/c_out"]
    assert found.parts == {}
    assert when in text_of_format(step, found)


def reference(generator, critic, weight, inside):
    """The gradients of both parts of the third batch, with some layers in the format."""
    of_critic, of_generator = losses(generator, critic, weight)
    emulated = scaler.formats.emulated(FP8, scaling="current")
    found = []
    only = {
        model: [path.split("/")[1] for path in inside if path.startswith(model.name)] for model in (generator, critic)
    }
    with_it = [emulated.tried(model, paths) for model, paths in only.items() if paths]
    for one in with_it:
        one.__enter__()
    for batch in batches()[:4]:
        each = []
        for model, loss in ((critic, of_critic), (generator, of_generator)):
            with tf.GradientTape() as tape:
                value = loss(batch)
            grads = tape.gradient(value, model.trainable_variables)
            each.append(np.concatenate([np.ravel(grad) for grad in grads]))
        found.append(each)
    for one in with_it:
        one.__exit__(None, None, None)
    return found


@pytest.mark.exhaustive
def test_the_layers_of_each_part_are_judged_by_the_gradients_of_that_part(tmp_path):
    """The loss of the critic is large: in one norm of both nothing that the generator does would be seen."""

    def build(run):
        return in_turns(run, weight=1e4)

    def slow(run):
        loop = build(run)
        for one in loop.train_step.optimizers.values():
            one.learning_rate = 0.0
        return loop

    found = find_format_cure(of(slow, tmp_path), 3, FP8)
    assert found.not_tried == {}
    assert list(found.parts) == ["critic", "generator"]
    generator, critic = models()
    whole = reference(generator, critic, 1e4, [])
    for place, name in enumerate(("critic", "generator")):
        own = found.parts[name]
        norm = np.linalg.norm(whole[2][place])
        mean = np.mean([one[place] for one in whole], 0)
        noise = np.sqrt(sum(np.linalg.norm(one[place] - mean) ** 2 for one in whole) / 3) / norm
        assert own.noise == pytest.approx(noise, rel=0.05)
        assert own.limit == min(own.noise, 0.5)
        for path in ("generator/g_in", "critic/c_out"):
            moved = reference(generator, critic, 1e4, [path])
            expected = np.linalg.norm(moved[2][place] - whole[2][place]) / norm
            assert own.alone[path] == pytest.approx(expected, rel=0.05, abs=1e-6)
    for path in found.inside:
        assert all(one.alone[path] <= one.limit for one in found.parts.values())


def hidden(run, seen=True):
    """A function whose model is in a dict that belongs to another function."""
    _, model = models()
    held = {"model": model}

    class Raw:
        kernel = tf.Variable(tf.ones([8, 1]))

    def predict(x):
        return held["model"](x) if seen else tf.tanh(x @ Raw.kernel)

    weights = model.trainable_variables if seen else [Raw.kernel]
    optimizer, loss_scaler = keras.optimizers.SGD(0.01), scaler.LossScaler()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((predict(x) - 1.0) ** 2)
            scaled = loss_scaler.scale(loss)
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights)
        return {"loss": loss, "applied": outcome.finite}

    return loops.Loop(step, tf.data.Dataset.from_tensor_slices(batches()), actions=actions(run))


def test_a_step_without_any_layer_is_told_how_to_name_its_model(tmp_path):
    def build(run):
        return hidden(run, seen=False)

    with pytest.raises(LoopError, match=r"the train step names no Keras model, .* step\.model = model"):
        find_format_cure(of(build, tmp_path), 3, FP8)


@pytest.mark.exhaustive
def test_gradients_that_are_not_finite_are_not_compared(tmp_path):
    def build(run):
        return in_turns(run, weight=float("inf"))

    with pytest.warns(scaler.StuckWarning):
        loop = of(build, tmp_path)
    with pytest.raises(LoopError, match="step 3: its gradients are not finite with every float16 layer in float32"):
        find_format_cure(loop, 3, FP8)
