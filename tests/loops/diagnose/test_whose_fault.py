"""Whose fault a bad batch is: of itself, of the dataset, or not of it alone. Nothing is said of what was not tried."""

import dataclasses
import math
import types
from typing import NamedTuple

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf
from models import squared_error

import loops
import scaler
from loops.diagnose.explain.examples import example_with, is_empty, label_behind, lost_columns
from loops.diagnose.explain.explain import step_with_finite_batches
from loops.diagnose.explain.explanation import Explanation, describe
from loops.diagnose.explain.remedies import Kind, Remedy
from loops.diagnose.explain.trials import blame_of
from loops.diagnose.graph.origin import Frame, Part
from loops.diagnose.graph.scan import Scan
from loops.observe import explain, explain_batch

GOOD = (tf.ones([3, 2]), tf.ones([3]))
BAD = (tf.constant([[1.0, 1.0], [1.0, math.nan], [1.0, 1.0]]), tf.ones([3]))
PASSES = "The next batch passes with the same weights"


def another(finite, tried=True):
    return Remedy(Kind.ANOTHER_BATCH, "another batch", tried, finite, 1.0, "", helps=finite)


@pytest.mark.parametrize(
    ("batch", "following", "remedies", "blame"),
    [
        (BAD, GOOD, [another(True)], "batch"),
        (BAD, GOOD, [another(False)], "batch"),
        (BAD, GOOD, [another(False, tried=False)], "batch"),
        (BAD, None, [], "batch"),
        (BAD, BAD, [another(False)], "dataset"),
        # Finite values that 16 bits make infinite.
        (GOOD, GOOD, [another(True)], "batch"),
        (GOOD, GOOD, [another(False)], None),
        (GOOD, None, [], None),
    ],
)
def test_what_is_said_of_the_next_batch_is_what_its_trial_showed(batch, following, remedies, blame):
    moment = types.SimpleNamespace(batch=batch, next_batch=following)
    assert blame_of(remedies, "data", None, moment) == blame
    found = Explanation(1, True, None, "loss", where="data", kind="nan", remedies=tuple(remedies), blame=blame)
    assert (PASSES in describe(found)) == any(one.finite for one in remedies)


def test_columns_that_no_example_fills():
    x = np.ones([4, 3], np.float32)
    x[:, 1] = np.nan
    images = np.ones([4, 2, 2, 3], np.float32)
    images[..., 2] = np.inf
    whole = np.full([4], np.nan, np.float32)
    batch = tuple(map(tf.constant, (x, images, whole, np.arange(4))))
    assert lost_columns(batch) == ((0, 1), (1, 2), (2, None))
    assert lost_columns(batch, (tf.ones([2, 3]), *batch[1:])) == ((1, 2), (2, None))
    assert lost_columns((tf.zeros([0, 3]), tf.zeros([4, 0]), tf.constant(1.0), tf.sparse.eye(3))) == ()


@pytest.mark.parametrize(
    ("batches", "later", "step"),
    [
        ({4: GOOD, 5: GOOD}, (4, 5), 4),
        ({4: BAD, 5: BAD, 6: GOOD}, (4, 5, 6), 6),
        ({4: BAD, 5: BAD}, (4, 5), None),
        # The only skips that a high scale does not explain.
        ({4: GOOD, 5: GOOD, 6: GOOD}, (6,), 6),
        # Windows of two: all batches of one have to be finite.
        ({4: BAD, 5: GOOD, 6: GOOD, 7: GOOD}, (5, 7), 7),
    ],
)
def test_the_first_later_step_whose_batches_are_finite(batches, later, step):
    attempts = [3, *(later if 7 in batches else batches)]
    moment = types.SimpleNamespace(
        step=3,
        rows=[{"step": number, "attempted": number in attempts} for number in (3, *batches)],
        later_batches=lambda last: (batches[number] for number in range(4, last + 1)),
    )
    assert step_with_finite_batches(moment, later) == step


@pytest.mark.exhaustive
def test_a_second_fault_in_the_same_streak_is_explained(tmp_path):
    """The bad batch cost one step, what follows the run."""
    planted.nan_batch_then_overflow(tmp_path).run(planted.STEPS["nan_batch_then_overflow"])
    found = explain(planted.nan_batch_then_overflow(tmp_path))
    assert (found.step, found.layer, found.where, found.reproduced) == (4, "exponential", "forward", True)
    assert (
        "Step 3, where the streak of these 9 further skips began, was skipped for another reason: the batch held a"
        in (found.sentence)
    )


@pytest.mark.parametrize(
    ("batch", "empty"),
    [
        ((tf.zeros([0, 3]), tf.zeros([0])), True),
        ((tf.zeros([2, 3]), tf.zeros([0])), False),
        ({"x": tf.zeros([0, 3]), "temperature": tf.constant(1.0)}, True),
        (tf.constant(1.0), False),
        (tf.RaggedTensor.from_row_lengths(tf.zeros([0]), tf.zeros([0], tf.int64)), True),
        (tf.RaggedTensor.from_row_lengths(tf.zeros([0]), [0, 0]), False),
        (tf.SparseTensor(np.zeros([0, 2], np.int64), [], [0, 3]), True),
        (tf.SparseTensor(np.zeros([0, 2], np.int64), [], [2, 3]), False),
    ],
)
def test_a_batch_is_empty_if_no_part_holds_an_example(batch, empty):
    assert is_empty(batch) == empty


@pytest.mark.slow
def test_an_empty_batch_is_called_that():
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10))
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    step = loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.01), loss_scaler=loss_scaler)
    x, y = np.ones([8, 4], np.float32), np.ones([8, 1], np.float32)
    step((x, y))
    # BatchNorm makes the gradients NaN, too, so that the step is skipped.
    assert not step((x[:0], y[:0]))["applied"]
    found = explain_batch(step, (x[:0], y[:0]), seconds=0)
    assert (found.verdict, found.empty, found.kind) == ("loss", True, "nan")
    assert "an empty batch" in loss_scaler.explain()


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


def test_what_xla_made_a_nan_of_is_named():
    step = train_step()
    outputs = step(batch(CLASSES))
    assert (bool(outputs["applied"]), int(outputs["cause"])) == (False, scaler.Cause.LOSS)
    assert "a label that the model has no class for" in step.loss_scaler.explain()
    found = explain_batch(step, batch(CLASSES), seconds=0)
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


FILLED = tf.ones([4, 3])
LOST = tf.constant(np.where(np.arange(3) == 2, np.nan, np.ones([4, 3])), tf.float32)


class Pair(NamedTuple):
    image: tf.Tensor
    label: tf.Tensor


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (LOST, ((0, 2),)),
        ((FILLED, LOST), ((1, 2),)),
        # TensorFlow sorts the keys: "u" comes first.
        (({"v": LOST, "u": FILLED}, FILLED), (("v", 2),)),
        (({"v": FILLED, "u": FILLED}, LOST), ((2, 2),)),
        ({"left": {"x": FILLED}, "right": {"x": LOST}}, (("right/x", 2),)),
        (({"x": FILLED}, {"x": LOST}), (("1/x", 2),)),
        (Pair(FILLED, LOST), (("label", 2),)),
        ({"x": LOST[:, 2]}, (("x", None),)),
        ({3: FILLED, 10: LOST}, (("10", 2),)),
    ],
)
def test_the_part_is_named(batch, found):
    assert lost_columns(batch) == found
