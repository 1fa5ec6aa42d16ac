"""Guards the kinds of gradients and state a window holds: none at all, indexed slices, and statistics in 16 bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, static
from models import one_layer, squared_error
from rigs import Rig, assert_finite

import loops
import scaler

TOKENS = np.int32([[0, 1, 1, 1], [3, 1, 0, 0], [5, 5, 5, 5], [2, 1, 5, 0]])


def embedding(kind):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Embedding(6, 3, dtype=kind), keras.layers.Flatten(dtype=kind)]
    return keras.Sequential([keras.Input([4], dtype="int32"), *layers, keras.layers.Dense(1, dtype=kind)])


@pytest.mark.slow
def test_an_embedding_accumulates_repeated_tokens():
    y = tf.constant(np.linspace(-1, 1, 4, dtype=np.float32)[:, np.newaxis])
    large = (tf.constant(TOKENS), y)
    small = [tuple(part[at : at + 2] for part in large) for at in (0, 2)]
    adam = keras.optimizers.Adam
    two = Rig(embedding("float32"), adam(0.01), example=small[0], loss_scaler=static(8.0), accumulate=2)
    one = loops.TrainStep(embedding("float32"), squared_error, adam(0.01), loss_scaler=static(8.0))
    untouched = two.step.model.layers[0].embeddings.numpy()[4]
    two.run(small * 2)
    for _ in range(2):
        one(large)
    np.testing.assert_array_equal(two.step.model.layers[0].embeddings.numpy()[4], untouched)
    for ours, theirs in zip(two.step.model.variables, one.model.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-6)


def test_repeated_tokens_are_summed_in_float32():
    """Each of a token's gradients fits float16, and their sum does not: an applied step without accumulation."""

    def steep(y, prediction):
        return tf.reduce_sum(tf.cast(prediction, tf.float32)) * 16384.0

    def model():
        keras.utils.set_random_seed(7)
        add = keras.layers.GlobalAveragePooling1D(dtype="float16")
        return keras.Sequential([keras.Input([8], dtype="int32"), keras.layers.Embedding(2, 1, dtype="float16"), add])

    x, y = tf.zeros([64, 8], tf.int32), tf.zeros([64, 1])
    # Any scale beside 1 would overflow each gradient by itself.
    unscaled = scaler.NoScaling()
    alone = loops.TrainStep(model(), steep, keras.optimizers.SGD(1e-8), loss_scaler=unscaled)((x, y))
    assert alone["applied"]
    step = loops.TrainStep(model(), steep, keras.optimizers.SGD(1e-8), loss_scaler=unscaled, accumulate=2)
    _, last = (step((x, y)) for _ in range(2))
    assert last["applied"]
    np.testing.assert_allclose(last["grad_norm"], alone["grad_norm"], rtol=1e-6)


def test_statistics_that_overflow_float16_are_not_kept_until_the_window_ends():
    """The moving variance of these inputs is infinite in float16, while the loss and its gradients are finite."""
    keras.utils.set_random_seed(7)
    layers = [
        keras.layers.BatchNormalization(momentum=0.0, scale=False, dtype="float16"),
        keras.layers.Dense(1, dtype="float16"),
    ]
    model = keras.Sequential([keras.Input([4], dtype="float16"), *layers])
    x, y = batch()
    rig = Rig(model, keras.optimizers.SGD(0.01), example=(x, y), loss_scaler=static(8.0), accumulate=2)
    calls = []
    for wide in (x * 1000, x, x, x * 1000):
        calls += rig.run([(wide, y)])
        assert_finite(rig.variables())
    assert [bool(call["applied"]) for call in calls] == [False, True, False, True]


def test_float16_windows_sum_in_float32():
    """A sum of many gradients of 1 and one of 2^-12 keeps the small one, which float16 would round away."""
    model = one_layer("float16")

    def loss(y, prediction):
        return y[0, 0] * tf.cast(model.layers[0].bias[0], tf.float32) + 0.0 * squared_error(y, prediction)

    x, _ = batch(count=1)
    step = loops.TrainStep(model, loss, keras.optimizers.SGD(1.0), accumulate=4)
    calls = [step((x, tf.constant([[slope]]))) for slope in (1.0, 1.0, 2.0**-12, 1.0)]
    np.testing.assert_array_equal(calls[-1]["grad_norm"], np.float32((3 + 2.0**-12) / 4))


class OfTwoTasks(keras.Model):
    """Which of its layers a loss depends on is a matter of what the batch holds."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name) for name in "ab")
        for layer in (self.a, self.b):
            layer.build((None, 2))
        self.built = True

    def call(self, x):
        return sum(layer(x[name]) for name, layer in {"a": self.a, "b": self.b}.items() if name in x)


@pytest.fixture(params=[False, True], ids=["eager", "graph"])
def two_tasks(request):
    """A model, and a function that takes a micro-batch of the tasks named."""
    model = OfTwoTasks()
    step = loops.TrainStep(
        model, lambda y, p: tf.reduce_mean(p), keras.optimizers.SGD(1.0), loss_scaler=static(8.0), accumulate=2
    )
    run = tf.function(step) if request.param else step
    return model, lambda tasks: run(({task: tf.ones([4, 2]) for task in tasks}, tf.zeros([4, 1])))


def kernels(model):
    return [float(layer.kernel.numpy()[0, 0]) for layer in (model.a, model.b)]


@pytest.mark.slow_with("graph-one more")
@pytest.mark.exhaustive_with("graph-another", "graph-one less")
@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (("a", "b"), r"weight '.*a/kernel' has no gradient in this micro-batch, and had one in an earlier one"),
        (("a", "ab"), r"weight '.*b/kernel' has a gradient in this micro-batch, and had none in an earlier one"),
        (("ab", "a"), r"weight '.*b/kernel' has no gradient in this micro-batch, and had one in an earlier one"),
    ],
    ids=["another", "one more", "one less"],
)
def test_no_gradient_of_a_window_is_dropped(two_tasks, tasks, said):
    model, take = two_tasks
    take(tasks[0])
    with pytest.raises(scaler.InvalidArgument, match=said):
        take(tasks[1])
    assert kernels(model) == [1.0, 1.0]
    assert take(tasks[0])["applied"]
    assert kernels(model) == [0.0 if task in tasks[0] else 1.0 for task in "ab"]


@pytest.mark.slow_with("graph")
def test_micro_batches_of_one_task_make_windows(two_tasks):
    model, take = two_tasks
    assert [bool(take("b")["applied"]) for _ in range(4)] == [False, True, False, True]
    assert kernels(model) == [1.0, -1.0]
