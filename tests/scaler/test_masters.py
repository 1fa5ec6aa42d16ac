"""Guards float32 master weights: small updates survive, the model follows, and values assigned from outside count."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import by_hand, descent, modes, modes_with, plain_descent
from ways import graph

import scaler
from scaler import MasterWeights

KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def half(*values):
    return tf.Variable(tf.constant(values, tf.float16))


@pytest.mark.slow_with("xla-float16-0.000244140625")
@modes_with(
    ("kind", "update"),
    eager=[("bfloat16", 2.0**-9)],
    graph=[("float16", 2.0**-12)],
    xla=[("float16", 2.0**-12)],
)
def test_updates_too_small_for_16_bits_add_up_in_the_master(execute, kind, update):
    variable = tf.Variable(tf.ones([], kind))
    masters = MasterWeights([variable])
    loss_scaler = by_hand(scaler.Static(1024.0))
    optimizer = descent(*masters.weights)
    step = execute(lambda: loss_scaler.apply(optimizer, [tf.constant(-update * 1024, kind)], masters).finite)
    for _ in range(4):
        assert step()
    assert tf.ones([], kind) + tf.constant(update, kind) == 1.0
    assert masters.weights[0].numpy() == 1 + 4 * update
    assert float(variable.numpy()) == 1 + 4 * update


@modes("eager", "graph")
def test_any_mix_of_dtypes(execute):
    variables = [tf.Variable(np.array([1.0, 2.0], kind)) for kind in KINDS.values()]
    masters = MasterWeights(variables)
    assert [weight.dtype for weight in masters.weights] == [tf.float32] * 3
    assert masters.weights[2] is variables[2]
    assert masters.weights[0] is not variables[0]
    loss_scaler, optimizer = by_hand(scaler.Static(2.0)), descent(*masters.weights)
    step = execute(lambda *grads: loss_scaler.apply(optimizer, list(grads), masters).finite)
    assert step(*(np.array([1.0, -2.0], kind) for kind in KINDS.values()))
    for variable, kind in zip(variables, KINDS.values(), strict=True):
        assert variable.numpy().dtype == kind
        np.testing.assert_array_equal(variable.numpy().astype(np.float32), [0.5, 3.0])


@modes("eager", "graph")
def test_a_value_assigned_to_the_model_replaces_the_master(execute):
    variable = half(1.0, 2.0, 3.0)
    masters = MasterWeights([variable])
    loss_scaler = by_hand(scaler.Static(2.0))
    optimizer = descent(*masters.weights)
    step = execute(lambda grad: loss_scaler.apply(optimizer, [grad], masters).finite)
    small = np.full(3, 2 * 2.0**-13, np.float16)
    step(small)
    variable.assign([1.0, 9.0, 3.0])
    step(small)
    # Where nothing was assigned, the small updates are still there.
    np.testing.assert_array_equal(masters.weights[0].numpy(), np.float32([1, 9, 3]) - np.float32([2, 1, 2]) * 2**-13)
    np.testing.assert_array_equal(variable.numpy(), masters.weights[0].numpy().astype(np.float16))


def test_keras_set_weights_counts():
    layer = keras.layers.Dense(2, dtype="float16")
    layer.build([None, 3])
    masters = MasterWeights(layer.trainable_variables)
    new = [np.full((3, 2), 0.75, np.float16), np.full(2, -4.0, np.float16)]
    layer.set_weights(new)
    by_hand(scaler.Static(2.0)).apply(plain_descent, [tf.zeros([3, 2]), tf.ones([2])], masters)
    np.testing.assert_array_equal(layer.get_weights()[0], new[0])
    np.testing.assert_array_equal(layer.get_weights()[1], new[1] - 0.5)


def test_an_assignment_that_is_the_rounding_of_the_master_keeps_the_master():
    variable = half(1.0)
    masters = MasterWeights([variable])
    masters.weights[0].assign([1 + 2.0**-13])
    variable.assign([1.0])
    masters.refresh()
    assert masters.weights[0].numpy() == [1 + 2.0**-13]


@modes("eager", "graph", "xla")
def test_a_master_beyond_the_range_saturates(execute):
    most = {"float16": 65504.0, "bfloat16": float(ml_dtypes.finfo("bfloat16").max)}
    masters = MasterWeights([tf.Variable(tf.zeros([7], kind)) for kind in most])
    # Between the maximum of float16 and infinity, too.
    values = {"float16": [65504.0, 65519.996, 65520.0, 70000.0, 1e38], "bfloat16": [most["bfloat16"]] + [3.4e38] * 4}
    for weight, kind in zip(masters.weights, most, strict=True):
        weight.assign([*values[kind], -3.4e38, 1.0])

    @tf.autograph.experimental.do_not_convert
    def write():
        masters.write()
        masters.refresh()
        return tf.constant(0)

    execute(write)()
    for variable, weight, kind in zip(masters.model_variables, masters.weights, most, strict=True):
        limit = most[kind]
        np.testing.assert_array_equal(tf.cast(variable, tf.float32), np.float32([*[limit] * 5, -limit, 1.0]))
        # And a saturated variable is no value from outside.
        np.testing.assert_array_equal(weight, np.float32([*values[kind], -3.4e38, 1.0]))


def test_names_paths_and_marks_are_those_of_the_model():
    layer = keras.layers.Dense(2, dtype="float16", kernel_constraint="non_neg", name="head")
    layer.build([None, 3])
    kernel, bias = layer.trainable_variables
    kernel.overwrite_with_gradient = True
    with tf.name_scope("elsewhere"):
        masters = MasterWeights([kernel, bias])
    assert [weight.path for weight in masters.weights] == ["head/kernel", "head/bias"]
    # By these an optimizer excludes from weight decay, in float32 too.
    assert [weight.name for weight in masters.weights] == [kernel.value.name, bias.value.name]
    assert kernel.value.name == "head/kernel:0"
    assert masters.weights[0].overwrite_with_gradient
    assert masters.weights[0].constraint is kernel.constraint
    assert masters.weights[1].constraint is None
    assert masters.model_variables[0] is kernel


def test_the_constraint_of_the_model_binds_the_master():
    layer = keras.layers.Dense(
        1, use_bias=False, dtype="float16", kernel_constraint="non_neg", kernel_initializer="ones"
    )
    layer.build([None, 2])
    masters = MasterWeights(layer.trainable_variables)
    optimizer = keras.optimizers.SGD(1.0)
    by_hand(scaler.Static(2.0)).apply(optimizer, [tf.constant([[8.0], [1.0]])], masters)
    np.testing.assert_array_equal(masters.weights[0].numpy(), [[0.0], [0.5]])
    np.testing.assert_array_equal(layer.kernel.numpy(), [[0.0], [0.5]])


def test_a_checkpoint_keeps_what_16_bits_cannot_hold(tmp_path):
    def build():
        variables = [half(1.0, 2.0), tf.Variable([3.0])]
        masters = MasterWeights(variables)
        return masters, tf.train.Checkpoint(variables=variables, masters=masters)

    saved, checkpoint = build()
    saved.weights[0].assign([1 + 2.0**-20, 2.0])
    saved.weights[1].assign([5.0])
    path = checkpoint.save(tmp_path / "ckpt")
    loaded, checkpoint = build()
    checkpoint.restore(path).assert_consumed()
    loaded.refresh()
    for old, new in zip(saved.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(old.numpy(), new.numpy())


def test_masters_made_inside_a_function_are_variables_outside():
    variable, made = half(1.0), []

    def write(index):
        if not made:
            made.append(MasterWeights([variable]))
        made[0].write()
        return [index + 1]

    graph(lambda: tf.while_loop(lambda index: index < 3, write, [0]))()
    assert made[0].weights[0].numpy() == [1.0]


def test_printed_they_say_how_much_they_hold():
    masters = scaler.MasterWeights([tf.Variable(tf.zeros([500, 500], "float16")), tf.Variable([1.0])])
    assert repr(masters) == "MasterWeights: 1 of 2 variables have a float32 copy, 250,000 values, 1.0 MB"
