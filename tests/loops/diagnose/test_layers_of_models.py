"""Guards whose a value of a graph is: the walk over a model's layers, their calls, their gradients and penalties."""

import importlib
import inspect
import textwrap

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf
from models import stateful_model
from tensorflow.python.ops import custom_gradient

from loops.diagnose.explain.remedies import Kind
from loops.diagnose.graph.calls import recording_layers
from loops.diagnose.graph.scan import line_of
from loops.observe import explain
from scaler.backend.layers import calls_through, layers_of


class _Nested(keras.Model):
    """Layers in lists, dicts and attributes, one of them twice."""

    def __init__(self):
        super().__init__()
        self.shared = keras.layers.Dense(2)
        self.listed = [keras.layers.Dense(2), [self.shared, keras.layers.Dense(3)]]
        self.named = {"a": keras.layers.Dense(2), "b": (keras.layers.Dense(2),)}
        self.wrapped = keras.layers.TimeDistributed(keras.layers.Dense(2))
        self.inside = keras.Sequential([keras.layers.Dense(2)])

    def call(self, x):
        return self.shared(x)


def functional():
    x = keras.Input([3, 4])
    inner = keras.Sequential([keras.Input([3, 16]), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    return keras.Model(x, inner(keras.layers.Bidirectional(keras.layers.LSTM(8, return_sequences=True))(x)))


MODELS = {
    "nested": _Nested,
    "functional": functional,
    "sequential": stateful_model,
    "unbuilt": lambda: keras.Sequential([keras.layers.Dense(2)]),
    "stacked": lambda: keras.layers.StackedRNNCells([keras.layers.LSTMCell(2), keras.layers.GRUCell(2)]),
    "rnn": lambda: keras.layers.RNN([keras.layers.LSTMCell(2), keras.layers.GRUCell(2)]),
    "attention": lambda: keras.layers.MultiHeadAttention(2, 2),
    "preprocessing": lambda: keras.layers.Pipeline([keras.layers.Rescaling(0.5), keras.layers.RandomFlip()]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_that_keras_finds_is_found_and_no_other(name):
    model = MODELS[name]()
    if name == "attention":
        model(tf.zeros([1, 2, 4]), tf.zeros([1, 2, 4]))
    keras_has = {id(layer) for layer in model._flatten_layers() if not isinstance(layer, keras.layers.InputLayer)}
    found = [layer for layer in layers_of(model) if not isinstance(layer, keras.layers.InputLayer)]
    assert {id(layer) for layer in found} == keras_has
    assert len(found) == len(keras_has)


def test_calls_go_through_a_function_and_the_layer_is_as_before():
    layer, x = keras.layers.Dense(2), tf.ones([1, 3])
    plain, called = layer(x), []

    def doubled(layer, call, /, *arguments, **named):
        called.append(layer)
        return 2.0 * call(*arguments, **named)

    with calls_through([layer], doubled), calls_through([layer], doubled):
        np.testing.assert_array_equal(layer(x), 4.0 * plain)
    with pytest.raises(ZeroDivisionError), calls_through([layer], doubled):
        raise ZeroDivisionError
    assert called == [layer, layer]
    assert "call" not in vars(layer)
    np.testing.assert_array_equal(layer(x), plain)


@pytest.mark.slow
@pytest.mark.usefixtures("lines")
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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as pip installs it, with a layer and a function."""
    folder = tmp_path / "site-packages"
    (folder / "acme").mkdir(parents=True)
    (folder / "acme" / "__init__.py").write_text(
        textwrap.dedent("""
            import keras
            import tensorflow as tf

            class Norm(keras.layers.Layer):
                def call(self, x):
                    return tf.math.log(x)

            def log(x):
                return tf.math.log(x)
        """)
    )
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("acme")


def line(function):
    """Of the logarithm in a function."""
    concrete = tf.function(function, autograph=False).get_concrete_function(tf.ones([2, 2]))
    (found,) = (line_of(one) for one in concrete.graph.get_operations() if one.type in ("Log", "Relu"))
    return found


@pytest.mark.usefixtures("lines")
def test_of_a_layer_of_a_package_it_is_the_package_s(package):
    layer = package.Norm()
    assert line(lambda x: layer(x)) == "acme/__init__.py:7"
    model = keras.Sequential([layer])
    assert line(lambda x: model(x)) == "acme/__init__.py:7"


@pytest.mark.usefixtures("lines")
def test_of_a_function_of_a_package_it_is_the_line_that_calls_it(package):
    assert line(lambda x: package.log(x)).startswith("tests/loops/diagnose/test_layers_of_models.py:")


@pytest.mark.usefixtures("lines")
def test_of_a_layer_of_keras_it_is_the_line_that_calls_it():
    relu = keras.layers.ReLU()
    assert line(lambda x: relu(x)).startswith("tests/loops/diagnose/test_layers_of_models.py:")
