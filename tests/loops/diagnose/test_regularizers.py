"""A penalty that overflows is of the layer whose weights or outputs it is for."""

import keras
import tensorflow as tf

from loops.diagnose.graph.calls import recording_layers


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
