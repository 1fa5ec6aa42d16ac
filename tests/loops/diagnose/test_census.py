"""Guards the table of what runs in which dtype: counted in real traces, and told from what a policy promised."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.observe import census

pytestmark = pytest.mark.slow

L = keras.layers


def model():
    keras.utils.set_random_seed(0)
    layers = [L.Dense(16, dtype="mixed_float16", name="half"), L.LayerNormalization(dtype="mixed_float16", name="norm")]
    return keras.Sequential([keras.Input([8]), *layers, L.Dense(4, dtype="float32", name="last")], name="all")


def row(found, layer, op, dtype=None):
    (one,) = [r for r in found.rows if (r.layer, r.op) == (layer, op) and dtype in (None, r.dtype)]
    return one


@pytest.fixture(scope="module")
def of_a_step():
    step = loops.TrainStep(model(), keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1))
    return step, census(step, (np.zeros([4, 8], np.float32), np.zeros([4, 4], np.float32)))


def test_a_step_forward_and_backward(of_a_step):
    _, found = of_a_step
    half, last = row(found, "all/half", "MatMul"), row(found, "all/last", "MatMul")
    # Forward, and the gradient of the kernel; the first layer needs none of its input.
    assert (half.dtype, half.promised, half.count, half.backward, half.differs) == ("float16", "float16", 2, 1, False)
    assert (last.dtype, last.promised, last.count, last.backward, last.differs) == ("float32", "float32", 3, 2, False)
    assert half.in_branches == 0  # The step takes no second pass.
    assert row(found, "all/norm", "Rsqrt").differs
    assert {one.layer for one in found.different} == {"all/norm"}


def test_casts_are_counted_apart_and_in_bytes(of_a_step):
    _, found = of_a_step
    kernel_and_bias = row(found, "all/half", "Cast", "float32 to float16")
    assert (kernel_and_bias.count, kernel_and_bias.cast_bytes, kernel_and_bias.differs) == (2, (8 * 16 + 16) * 2, False)
    assert found.cast_bytes == sum(one.cast_bytes or 0 for one in found.rows) > 0
    assert row(found, "all/half", "MatMul").cast_bytes is None


def test_the_table_can_be_read(of_a_step):
    lines = str(of_a_step[1]).splitlines()
    assert lines[0].split() == ["layer", "operation", "dtype", "count", "in", "branches", "promised"]
    assert any(line.split()[:4] == ["all/norm", "Rsqrt", "float32", "1"] and line.endswith("differs") for line in lines)
    assert lines[-1] == f"casts write {of_a_step[1].cast_bytes:,} bytes a step"


def test_a_loop_knows_its_batches(of_a_step):
    step, found = of_a_step
    data = tf.data.Dataset.from_tensor_slices((np.zeros([4, 8], np.float32), np.zeros([4, 4], np.float32)))
    loop = loops.Loop(step, data.batch(4, drop_remainder=True))
    assert census(loop).rows == found.rows
    with pytest.raises(scaler.InvalidArgument, match="1 arguments with a Loop"):
        census(loop, 1)


def test_a_float32_product_in_a_half_model_differs():
    class Leak(L.Layer):
        def call(self, x):
            return tf.matmul(tf.cast(x, tf.float32), tf.ones([8, 8]))

    leaking = keras.Sequential([keras.Input([8]), Leak(dtype="mixed_float16", name="leak")], name="outer")
    found = census(tf.function(lambda x: leaking(x)), tf.TensorSpec([4, 8]))
    assert [(one.layer, one.op, one.dtype) for one in found.different] == [("outer/leak", "MatMul", "float32")]


def test_loops_and_branches_inside_of_layers_are_seen():
    recurrent = keras.Sequential([keras.Input([6, 8]), L.SimpleRNN(8, dtype="mixed_float16", name="r")], name="outer")
    found = census(lambda x: recurrent(x), tf.TensorSpec([2, 6, 8]))
    cell = row(found, "outer/r/simple_rnn_cell", "MatMul")
    assert (cell.dtype, cell.differs) == ("float16", False)

    @tf.function
    def branching(x):
        if tf.reduce_sum(x) > 0:
            x = tf.exp(x)
        return tf.sin(x)

    found = census(branching, tf.TensorSpec([2]))
    assert (row(found, None, "Exp").count, row(found, None, "Exp").in_branches) == (0, 1)
    assert (row(found, None, "Sin").count, row(found, None, "Sin").in_branches) == (1, 0)
    assert row(found, None, "Sin").promised is None


def test_functions_called_twice_count_twice_and_unknown_shapes_count_no_bytes():
    inner = tf.function(lambda x: tf.cast(x, tf.float16))
    found = census(lambda x: inner(x) + inner(x), tf.TensorSpec([None]))
    assert (row(found, None, "Cast").count, row(found, None, "Cast").cast_bytes) == (2, 0)


def test_layers_of_one_name_keep_their_own_promises():
    inner = keras.Sequential([keras.Input([8]), L.Dense(8, dtype="float32", name="same")], name="inner")
    outer = keras.Sequential([keras.Input([8]), L.Dense(8, dtype="mixed_float16", name="same"), inner], name="outer")
    found = census(lambda x: outer(x), tf.TensorSpec([2, 8]))
    assert row(found, "outer/same", "MatMul").promised == "float16"
    assert row(found, "outer/inner/same", "MatMul").promised == "float32"
    assert found.different == []


def test_what_is_no_step_is_refused():
    with pytest.raises(scaler.InvalidArgument, match=r"census\(3\): expected an hs.TrainStep"):
        census(3)


def test_what_needs_arguments_and_gets_none_is_refused():
    for function in (lambda x: x, tf.function(lambda x: x), model()):
        with pytest.raises(scaler.InvalidArgument, match="it takes arguments, and none were given"):
            census(function)
