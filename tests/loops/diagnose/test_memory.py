"""Guards the counts of a step's bytes: those of a small model by hand, and what optimizers and allocators say."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from loops.diagnose.doctor.shown import check_picture, write_picture
from loops.diagnose.memory import Bytes, footprints, slot_values
from loops.support.errors import NotWritable

BATCH, INPUTS, HIDDEN, OUTPUTS = 64, 16, 32, 8


def product(y, prediction):
    """A loss whose gradient needs nothing but y."""
    return tf.reduce_sum(prediction * y)


def batch():
    return tf.zeros([BATCH, INPUTS]), tf.zeros([BATCH, OUTPUTS])


def two_layers(policy):
    return keras.Sequential(
        [
            keras.Input([INPUTS]),
            keras.layers.Dense(HIDDEN, activation="relu", dtype=policy, name="first"),
            keras.layers.Dense(OUTPUTS, dtype=policy, name="last"),
        ]
    )


def counted(model, optimizer=None, **options):
    found = footprints(model, product, batch(), optimizer or keras.optimizers.Adam(), **options)
    return {one.policy: one for one in found}


@pytest.fixture(scope="module")
def of_float32():
    return counted(two_layers("float32"), checkpointing=False)


FIRST, LAST = INPUTS * HIDDEN + HIDDEN, HIDDEN * OUTPUTS + OUTPUTS
HELD = BATCH * HIDDEN
"""The output of the first layer, which is all that both backward passes need of it."""


def test_float32_is_counted_as_by_hand(of_float32):
    found = of_float32["float32"]
    first = Bytes(weights=4 * FIRST, slots=8 * FIRST, gradients=4 * FIRST, activations=4 * HELD)
    last = Bytes(weights=4 * LAST, slots=8 * LAST, gradients=4 * LAST)
    assert {name: one for name, one in found.layers.items() if one.total} == {"first": first, "last": last}
    assert found.all == first + last


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_policies_halve_what_is_kept_and_keep_copies(of_float32, policy):
    found = of_float32[policy].all
    weights = 4 * (FIRST + LAST)
    assert (found.weights, found.masters, found.slots, found.gradients) == (weights, 0, 2 * weights, weights)
    # The batch in 16 bits, for the first kernel's gradient; the last kernel in 16 bits, for that of its input.
    assert found.activations == 2 * HELD + 2 * BATCH * INPUTS
    assert found.copies == 2 * HIDDEN * OUTPUTS


def test_float16_with_masters_has_no_copies(of_float32):
    found = of_float32["float16"].all
    values = FIRST + LAST
    assert (found.weights, found.masters, found.slots, found.gradients) == (
        *(2 * values, 4 * values, 8 * values),
        2 * values,
    )
    assert (found.activations, found.copies) == (2 * HELD + 2 * BATCH * INPUTS, 0)


def test_a_model_in_float16_is_counted_as_one_of_float32_foretells(of_float32):
    found = counted(two_layers("float16"), policies=["float32", "mixed_float16"], checkpointing=False)
    assert list(found) == ["float16", "float32", "mixed_float16"]
    for policy, one in found.items():
        expected = of_float32[policy].all
        # Older Keras casts the batch to float16 first, and then back.
        casts = one.all.activations - expected.activations
        assert casts in ((0, 4 * BATCH * INPUTS) if policy == "float32" else (0,))
        assert dataclasses.replace(one.all, activations=expected.activations) == expected, policy


def test_without_masters_slots_are_of_16_bits_too():
    found = counted(two_layers("float16"), policies=(), masters=False, checkpointing=False)["float16"].all
    assert (found.masters, found.slots) == (0, 4 * (FIRST + LAST))


def test_what_is_frozen_has_neither_gradients_nor_slots():
    model = two_layers("float32")
    model.layers[0].trainable = False
    found = counted(model, policies=(), checkpointing=False)["float32"]
    # What the first layer gives is an input of the last one's gradient.
    assert found.layers["first"] == Bytes(weights=4 * FIRST, activations=4 * HELD)
    assert found.layers["last"].slots == 8 * LAST


def test_layers_with_a_policy_of_their_own_keep_it():
    model = two_layers("float32")
    model.layers[1].dtype_policy = keras.DTypePolicy("mixed_float16")
    found = counted(model, policies=["float16"], checkpointing=False)
    assert found["float16"].layers["first"].masters == 4 * FIRST
    assert found["float16"].layers["last"].masters == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(),
        keras.optimizers.SGD(momentum=0.9),
        keras.optimizers.Adafactor(),
        keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5), amsgrad=True),
    ],
    ids=lambda one: one.name,
)
def test_slots_are_those_that_the_optimizer_makes(optimizer):
    model = two_layers("float32")
    found = slot_values(model, optimizer)
    assert set(found) == {id(variable) for variable in model.trainable_variables}
    once = len(optimizer.variables)
    optimizer.build(model.trainable_variables)
    assert sum(found.values()) == sum(int(tf.size(one)) for one in optimizer.variables[once:])


def test_a_function_does_not_say_what_it_keeps():
    found = counted(two_layers("float32"), lambda grads, variables: None, policies=(), checkpointing=False)["float32"]
    assert found.all.slots is None
    assert found.all.total == 8 * (FIRST + LAST) + 4 * HELD


def test_a_checkpointed_sequential_keeps_the_inputs_of_its_parts():
    layers = [keras.layers.Dense(HIDDEN, activation="relu", dtype="float32") for _ in range(8)]
    model = keras.Sequential([keras.Input([INPUTS]), *layers, keras.layers.Dense(OUTPUTS, dtype="float32")])
    found = counted(model, policies=())["float32"]
    assert found.all.activations == 8 * 4 * HELD
    # Nine layers in three parts: the inputs of two of them, and the outputs of three layers again.
    assert found.recomputed == (2 + 3) * 4 * HELD
    assert found.total_recomputed == found.all.total - 3 * 4 * HELD


def test_blocks_are_the_layers_that_hold_others():
    def block():
        inputs = keras.Input([INPUTS])
        x = keras.layers.Dense(HIDDEN, activation="relu", dtype="float32")(inputs)
        x = keras.layers.Dropout(0.5, dtype="float32", seed=1)(x)
        return keras.Model(inputs, keras.layers.Dense(INPUTS, dtype="float32")(x))

    inputs = keras.Input([INPUTS])
    x = block()(block()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(OUTPUTS, dtype="float32")(x))
    found = counted(model, policies=())["float32"]
    one_block = 4 * HELD + 4 * HELD + BATCH * HIDDEN + 4 * BATCH * INPUTS  # relu, dropout with its mask, the output.
    assert found.all.activations == 2 * one_block
    # What the blocks give, the masks that both draw again, which wait for nothing, and one block's own.
    assert found.recomputed == 2 * 4 * BATCH * INPUTS + 2 * BATCH * HIDDEN + one_block


def test_a_model_of_layers_side_by_side_has_no_blocks():
    inputs = keras.Input([INPUTS])
    model = keras.Model(inputs, keras.layers.Dense(OUTPUTS, dtype="float32")(inputs))
    found = counted(model, policies=())["float32"]
    assert (found.recomputed, found.total_recomputed) == (None, None)


def test_what_a_loop_keeps_for_its_gradient_is_counted():
    steps, units = 6, 8
    inputs = keras.Input([steps, INPUTS])
    x = keras.layers.SimpleRNN(units, dtype="float32", name="rnn")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(OUTPUTS, dtype="float32")(x))
    data = tf.zeros([BATCH, steps, INPUTS]), tf.zeros([BATCH, OUTPUTS])
    (found,) = footprints(model, product, data, keras.optimizers.SGD(), policies=(), checkpointing=False)
    states, read = steps * BATCH * units * 4, steps * BATCH * INPUTS * 4
    assert found.all.uncounted == 0
    # The states that each turn gives, those it was given, and the inputs that it read.
    assert found.layers["rnn"].activations >= 2 * states + read
    assert found.layers["rnn"].activations < 4 * states + 3 * read


MEASURED = """
import keras, tensorflow as tf
from loops.diagnose.memory import footprints
layers = [keras.layers.Dense(1024, activation="gelu") for _ in range(6)]
model = keras.Sequential([keras.Input([256]), *layers, keras.layers.Dense(8)])
batch = tf.random.normal([2048, 256]), tf.zeros([2048, 8])
loss = lambda y, prediction: tf.reduce_mean((prediction - y) ** 2)
(found,) = footprints(model, loss, batch, keras.optimizers.SGD(), policies=(), checkpointing=False)
@tf.function
def step():
    with tf.GradientTape() as tape:
        value = loss(batch[1], model(batch[0], training=True))
    return tf.add_n([tf.reduce_sum(one) for one in tape.gradient(value, model.trainable_variables)])
step()
tf.config.experimental.reset_memory_stats("CPU:0")
before = tf.config.experimental.get_memory_info("CPU:0")["current"]
step().numpy()
print(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before, found.all.activations, found.all.gradients)
"""


@pytest.mark.exhaustive
def test_the_allocator_agrees(tmp_path):
    """Its peak is what is kept, and a little more: what an operation at work needs."""
    root = str(pathlib.Path(__file__).parents[3])
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, activations, gradients = map(int, done.stdout.split())
    assert 0.95 * activations < peak < 1.1 * (activations + gradients)


@pytest.mark.parametrize("name", ["memory.png", "memory.html"])
def test_the_picture_is_drawn(of_float32, tmp_path, name):
    write_picture(list(of_float32.values()), tmp_path / name)
    written = (tmp_path / name).read_bytes()
    assert written.startswith(b"\x89PNG" if name.endswith("png") else b"<!DOCTYPE html>")
    assert name.endswith("png") or b"mixed_bfloat16" in written or b"<svg" in written


@pytest.mark.parametrize("name", ["memory.txt", "memory", "no/such/folder/memory.png"])
def test_a_picture_that_cannot_be_written_is_refused_before(tmp_path, name):
    with pytest.raises(NotWritable, match=r"no picture can be written there. Name one of .png"):
        check_picture(tmp_path / name)
