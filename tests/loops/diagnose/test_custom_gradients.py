"""What a custom gradient computes is of the layer that calls its function."""

import inspect

import keras
import planted
import pytest
import tensorflow as tf
from tensorflow.python.ops import custom_gradient

from loops.diagnose.explain.remedies import Kind
from loops.diagnose.graph.calls import recording_layers
from loops.observe import explain


@pytest.mark.slow
def test_the_function_the_layer_and_the_line_are_named(tmp_path, tried):
    tried(Kind.DENOMINATOR)
    planted.custom_gradient(tmp_path).run(1)
    found = explain(planted.custom_gradient(tmp_path), 1)
    named = (found.layer, found.inside, found.custom_gradient, found.operation)
    assert named == ("direction", True, "direction", "RealDiv")
    lines = inspect.getsource(planted).splitlines()
    line = lines.index("        return upstream * tf.abs(x) / tf.abs(x)") + 1
    assert found.line.endswith(f"planted.py:{line}")
    assert any(one.kind is Kind.DENOMINATOR and one.layer == "direction" for one in found.remedies)


@tf.custom_gradient
def outer(x):
    def grad(upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner(x)
        return tape.gradient(y, x, output_gradients=upstream) * 2.0

    return x * 1.0, grad


@tf.custom_gradient
def inner(x):
    return x * 3.0, lambda upstream: upstream * 3.0


class Calls(keras.layers.Layer):
    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


def noted():
    layers = {name: Calls(function, name=name) for name, function in {"a": outer, "b": inner, "c": inner}.items()}

    found = []

    @tf.function(autograph=False)
    def taken(x):
        with recording_layers(layers) as places, tf.GradientTape() as tape:
            tape.watch(x)
            y = layers["c"](layers["b"](layers["a"](x)))
            found.append((places, tape.gradient(y, x)))

    for layer in layers.values():
        layer(tf.ones([2]))
    concrete, (places, _) = taken.get_concrete_function(tf.ones([2])), *found
    kinds = [one.type for one in concrete.graph.get_operations()]
    by_number = places.by_number(len(kinds))
    return [(name, by_number[number]) for number, name in sorted(places.in_customs().items()) if kinds[number] == "Mul"]


def test_each_call_is_of_its_own_layer_and_the_innermost_function_counts():
    assert noted() == [("inner", "c"), ("inner", "b"), ("outer", "a"), ("inner", "a"), ("outer", "a")]
    assert custom_gradient.record.__name__ == "tensorflow.python.eager.record"


def test_without_the_private_name_nothing_is_noted(monkeypatch):
    monkeypatch.delattr(custom_gradient.record, "record_operation")
    with recording_layers({}) as places:
        pass
    assert places.customs == []
