"""Guards that a label outside of the classes is called that where TensorFlow makes a NaN of it, and not bad weights."""

import dataclasses
import io

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf

import loops
import scaler
from loops.diagnose.explain.examples import example_with, label_behind
from loops.diagnose.explain.explanation import Label
from loops.diagnose.graph.origin import Frame, Part
from loops.diagnose.graph.scan import Scan
from loops.observe import explain_batch

CLASSES, ROWS = 10, 8
LABELS = np.arange(ROWS)
KERNEL = "SparseSoftmaxCrossEntropyWithLogits"


def train_step(jit_compile=True):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(CLASSES, use_bias=False)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loops.TrainStep(model, loss, keras.optimizers.SGD(0.1), jit_compile=jit_compile)


def batch(worst=None):
    """Eight rows, of which the last but two has this label."""
    labels = LABELS.copy()
    if worst is not None:
        labels[ROWS - 3] = worst
    return np.ones([ROWS, 4], np.float32), labels


def test_what_xla_made_a_nan_of_is_named_once():
    """By the action, and right behind a step that a program takes by itself; above the classes and below them."""
    text, told, step = io.StringIO(), loops.Explain(), train_step()
    progress = loops.Progress(console=rich.console.Console(file=text, width=400))
    data = tf.data.Dataset.from_tensors(batch(-1)).repeat(4)
    counters = loops.Loop(step, data, steps_per_call=2, actions=[told, progress]).run(4)
    assert counters.skipped == 4
    (one,) = told.explanations
    assert one.label == Label(-1, CLASSES)
    assert one.sentence in text.getvalue()
    assert "could not be explained" not in text.getvalue()
    outputs = step(batch(CLASSES))
    assert (bool(outputs["applied"]), int(outputs["cause"])) == (False, scaler.Cause.LOSS)
    assert "a label that the model has no class for" in step.loss_scaler.explain()
    found = explain_batch(step, batch(CLASSES))
    assert (found.verdict, found.where, found.label, found.example) == ("loss", "data", (CLASSES, CLASSES), ROWS - 3)
    assert found.to_dict()["label"] == {"value": CLASSES, "classes": CLASSES}
    assert step(batch())["applied"]


def measured(worst, values=None):
    """A loss as a GPU measures it: the operation of the graph, and what it was given."""
    logits, labels = tf.zeros([ROWS, CLASSES]), tf.constant(batch(worst)[1])
    graph = tf.function(lambda one, other: tf.nn.sparse_softmax_cross_entropy_with_logits(other, one))
    operations = graph.get_concrete_function(logits, labels).graph.get_operations()
    kernel = next(one for one in operations if one.type == KERNEL)
    given = dict(zip((tensor.name for tensor in kernel.inputs), (logits, labels), strict=True))
    own = {tensor.name: one for one in operations for tensor in one.outputs}
    seen = Scan({}, {}, [], [], [], own, given if values is None else values)
    name = kernel.outputs[0].name
    return seen, Frame(name, KERNEL, "float32", Part.FORWARD, None, (kernel.inputs[0].name,), 2.0, has_nan=True)


@pytest.mark.parametrize("worst", [CLASSES, -1, 2**40])
def test_on_a_gpu_it_is_read_from_what_the_kernel_was_given(worst):
    assert label_behind(*measured(worst)) == (worst, CLASSES)


def test_what_was_finite_and_in_range_is_not_blamed():
    assert label_behind(*measured(CLASSES - 1)) is None
    assert label_behind(*measured(CLASSES, values={})) is None
    seen, frame = measured(CLASSES)
    other = next(name for name, one in seen.operations.items() if one.type == "Placeholder")
    assert label_behind(seen, dataclasses.replace(frame, name=other)) is None


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ((np.ones([3, 2], np.float32), [1, 7, 7]), 1),
        ((np.ones([3, 2], np.float32), [[1], [2], [7]]), 2),
        ((np.ones([3, 2], np.float32), [[1, 7], [2, 7]]), None),
        (([7, 7, 7], [1, 7, 7]), None),
        ((np.ones([3, 2], np.float32), [1, 2, 3]), None),
        ((7,), None),
    ],
)
def test_the_example_is_named_where_one_part_alone_can_hold_it(parts, found):
    assert example_with(7, tuple(map(tf.constant, parts))) == found
