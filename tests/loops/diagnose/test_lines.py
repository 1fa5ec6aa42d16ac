"""Whose line of Python an explanation shows."""

import importlib
import textwrap

import keras
import pytest
import tensorflow as tf

from loops.diagnose.graph.scan import line_of


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


def test_of_a_layer_of_a_package_it_is_the_package_s(package):
    layer = package.Norm()
    assert line(lambda x: layer(x)) == "acme/__init__.py:7"
    model = keras.Sequential([layer])
    assert line(lambda x: model(x)) == "acme/__init__.py:7"


def test_of_a_function_of_a_package_it_is_the_line_that_calls_it(package):
    assert line(lambda x: package.log(x)).startswith("tests/loops/diagnose/test_lines.py:")


def test_of_a_layer_of_keras_it_is_the_line_that_calls_it():
    relu = keras.layers.ReLU()
    assert line(lambda x: relu(x)).startswith("tests/loops/diagnose/test_lines.py:")
