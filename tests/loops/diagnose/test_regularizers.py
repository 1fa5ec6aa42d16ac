"""A penalty that overflows is of the layer whose weights or outputs it is for."""

import keras
import planted
import pytest
import tensorflow as tf

from loops.diagnose.graph.calls import recording_layers
from loops.observe import explain


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning")
def test_a_penalty_in_float16_is_named_and_float32_helps_it(tmp_path):
    """Its layer's variables are float16: in float32 they are float32, and so is the penalty."""
    planted.regularizer(tmp_path).run(planted.STEPS["regularizer"])
    loop = planted.regularizer(tmp_path)
    found = explain(loop, 1)
    assert (found.verdict, found.where, found.layer, found.regularizer) == ("loss", "forward", "big", True)
    assert (found.where, found.kind, found.operation) == ("forward", "inf", "Sum")
    helped = {one.name for one in found.remedies if one.finite}
    assert {"'big' in float32", "every layer in float32", "bfloat16"} <= helped
    big = loop.train_step.model.get_layer("big")
    assert (big.kernel.dtype, big.kernel.value.dtype) == ("float16", tf.float16)
    assert type(big.kernel.regularizer) is keras.regularizers.L2


def test_penalties_of_outputs_and_of_parts_are_noted():
    """Those of a layer inside of another one count to the inner one."""

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="outer")
            self.inner = keras.layers.Dense(2, name="inner", activity_regularizer="l2", kernel_regularizer="l1")

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x) + 1.0

    outer = Outer()
    outer(tf.ones([1, 3]))
    layers = {"outer": outer, "outer/inner": outer.inner}
    found = []

    @tf.function(autograph=False)
    def taken():
        with recording_layers(layers) as places:
            outer(tf.ones([1, 3]))
            found.append((places, outer.losses))

    concrete, (places, _) = taken.get_concrete_function(), *found
    by_number = places.by_number(len(concrete.graph.get_operations()))
    assert [path for path, _, _ in places.regularizers] == ["outer/inner"] * 2
    assert {by_number[number] for number in places.in_regularizers()} == {"outer/inner"}
    assert by_number[places.calls[-1][2] - 1] == "outer"
    assert isinstance(outer.inner.activity_regularizer, keras.regularizers.L2)
