"""Guards `Loop(jit_compile="auto")`: on a GPU as Keras's `fit` decides, on a CPU for a step in 16 bits."""

import io
import re

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf
from mirrored import mirrored
from models import squared_error

import loops
import scaler
from loops.backend import steps
from loops.loop import calls
from loops.loop import compilation as compiled

DATA = (
    tf.data.Dataset.from_tensor_slices((np.ones([32, 4], np.float32), np.ones([32, 1], np.float32))).batch(8).repeat()
)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(compiled, "has_gpu", lambda: True)


def dense(policy="mixed_float16", **options):
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1, dtype=policy, **options)])


def step(**options):
    keras.utils.set_random_seed(0)
    return loops.TrainStep(
        dense(), squared_error, keras.optimizers.SGD(0.01), loss_scaler=scaler.LossScaler(), **options
    )


class Forward:
    """A step that trains nothing: where the question is whether XLA compiles it, which is soon done."""

    def __init__(self, model, loss=squared_error):
        self.model, self.loss = model, loss

    def __call__(self, x, y):
        return {"loss": self.loss(y, self.model(x, training=True))}


def cheap(x, y):
    return {"loss": tf.reduce_sum(x)}


def chooses(*arguments, **options):
    """What a loop chooses when it is made: False is final, and True if the step allows it."""
    return loops.Loop(*arguments, **options).calls.jit_compile


def compiles(loop):
    loop.run(2)
    assert loop.counters.data == 2
    return loop.calls.jit_compile


def test_a_step_in_16_bits_is_compiled_on_a_cpu_and_the_run_says_so_once():
    said = io.StringIO()
    loop = loops.Loop(Forward(dense()), DATA, actions=[loops.Progress(console=rich.console.Console(file=said))])
    assert compiles(loop)
    loop.run(4)
    assert said.getvalue().count("Loop(jit_compile=False) leaves it as a graph") == 1


def test_another_step_is_not_compiled_on_a_cpu():
    """One without a model, or with one in float32."""
    said = io.StringIO()
    loop = loops.Loop(cheap, DATA, actions=[loops.Progress(console=rich.console.Console(file=said))])
    assert not compiles(loop)
    assert "XLA" not in said.getvalue()
    assert not chooses(Forward(dense("float32")), DATA)


def words():
    """A small model of words."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(10, 4, dtype="mixed_float16"), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input([5], dtype="int32"), *layers, keras.layers.Dense(3, dtype="float32")])


RIGHT = [0, 1, 2, 9, -1], 2


def sentences(*batches):
    """Batches of four sentences, of which the last one and its label are given."""
    sentences = np.array([[[0, 1, 2, 3, 4]] * 3 + [words] for words, _ in batches], np.int32)
    labels = np.array([[0, 1, 2, label] for _, label in batches])
    return tf.data.Dataset.from_tensor_slices((sentences, labels)).repeat()


def test_indices_outside_of_their_range_are_refused_as_in_a_graph():
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = loops.TrainStep(words(), cross_entropy, keras.optimizers.SGD(0.1), loss_scaler=scaler.LossScaler())
    bad = {
        "an index in the batch is 10, but the model has 10 rows for it, 0 to 9.": ([0, 1, 2, 3, 10], 2),
        "an index in the batch is -11, but the model has 10 rows for it": ([0, 1, 2, 3, -11], 2),
        "a label is 3, but the model has 3 classes, 0 to 2.": ([0, 1, 2, 3, 4], 3),
    }
    loop = loops.Loop(step, sentences(RIGHT, *(one for batch in bad.values() for one in (batch, RIGHT))))
    for applied, said in enumerate(bad, 1):
        with pytest.raises(loops.BadBatch, match=re.escape(said)):
            loop.run(9)
        assert loop.calls.jit_compile
        assert loop.counters.applied == applied


def asserts(y, prediction):
    tf.debugging.assert_less(tf.reduce_sum(prediction), tf.constant(9.0, prediction.dtype))
    return tf.reduce_mean(prediction)


def unknown_labels(y, prediction):
    labels = tf.abs(tf.cast(y[:, 0] - 1, tf.int32))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, prediction))


def size_of_data(y, prediction):
    return tf.reduce_mean(prediction[: tf.cast(tf.reduce_max(y), tf.int32)])


def draws(y, prediction):
    return tf.reduce_mean(prediction) * tf.random.uniform([], dtype=prediction.dtype)


@pytest.mark.parametrize("loss", [asserts, unknown_labels, size_of_data, draws])
def test_a_step_of_which_xla_would_leave_something_out_runs_in_a_graph(loss):
    loop = loops.Loop(Forward(dense(), loss), DATA, steps_per_call=1)
    assert loop.calls.jit_compile
    assert not compiles(loop)


def test_a_step_that_xla_refuses_in_the_end_takes_each_batch_once():
    """As it refuses the gradient of as many turns as values say, for which it has all kernels."""
    seen, taken = [], tf.Variable(0)

    def refused(y, prediction):
        with tf.GradientTape() as tape:
            tape.watch(prediction)
            turns = tf.while_loop(lambda at, x: at < y[0, 0], lambda at, x: (at + 1.0, x * 1.0), [0.0, prediction])
        slopes = tf.cast(tape.gradient(turns[1], prediction), tf.float32)
        with tf.control_dependencies([taken.assign_add(1)]):
            return y[0, 0] * tf.reduce_mean(slopes)

    def note(visit):
        seen.extend(visit.outputs["loss"].tolist())

    data = tf.data.Dataset.range(6).map(lambda n: (tf.ones([8, 4]), tf.fill([8, 1], tf.cast(n, tf.float32))))
    loop = loops.Loop(Forward(dense(), refused), data, steps_per_call=2, actions=[note])
    loop.calls.trace()
    assert loop.calls.jit_compile
    loop.run(5)
    assert (seen, int(taken)) == ([0.0, 1.0, 2.0, 3.0, 4.0], 5)
    assert not loop.calls.jit_compile
    assert loop.calls.said == []


def test_a_lookup_inside_of_a_function_keeps_the_graph():
    embedding = keras.layers.Embedding(10, 4, dtype="mixed_float16")
    embedding.build([None, 5])
    look = tf.function(lambda x: embedding(x))

    def loss(x):
        return {"loss": tf.reduce_mean(tf.cast(look(x), tf.float32))}

    words = tf.data.Dataset.from_tensors(np.array([[0, 1, 2, 3, 10]], np.int32)).repeat()
    loop = loops.Loop(loss, words)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        loop.run(2)
    assert not loop.calls.jit_compile


def test_rows_and_lengths_that_a_function_of_the_dataset_changes_are_not_compiled_on_a_cpu():
    some = DATA.map(lambda x, y: (x[:3], y[:3]))
    assert some.element_spec[0].shape[0] is None
    assert not chooses(Forward(dense()), some)
    after = DATA.take(9).prefetch(1).repeat()
    assert compiled.has_steady_rows(after)
    # Also a model that is not built yet is compiled at once.
    model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
    lengths = tf.data.Dataset.range(2, 10).map(lambda length: (tf.ones([4, length, 3]), tf.ones([4, length, 1])))
    assert not chooses(Forward(model), lengths)
    assert compiles(loops.Loop(Forward(model), after))


def test_a_run_goes_on_as_it_began(tmp_path, monkeypatch):
    def ran(steps, chosen=None, **options):
        monkeypatch.setattr(calls, "may_compile", lambda *_: chosen)
        saves = loops.Checkpoint(tmp_path, every=2, resume=True, changed=list(options))
        loop = loops.Loop(cheap, DATA, steps_per_call=1, actions=[saves], **options)
        loop.run(steps)
        return loop

    assert ran(2, True).calls.jit_compile
    assert ran(4, False).calls.jit_compile
    another = ran(6, jit_compile=False)
    assert not another.calls.jit_compile
    assert "jit_compile" in another.resumed.changes[0]
    assert not ran(8, True).calls.jit_compile


def test_what_was_asked_for_is_done(gpu):
    assert compiles(loops.Loop(cheap, DATA, steps_per_call=1))
    assert not compiles(loops.Loop(cheap, DATA, steps_per_call=1, jit_compile=False))


def test_a_step_that_compiles_its_passes_is_left_alone(gpu):
    assert chooses(step(), DATA)
    assert not chooses(step(jit_compile=True), DATA)


def test_replicas_and_determinism_are_as_in_fit(gpu, monkeypatch):
    strategy = mirrored(2)
    with strategy.scope():
        made = step()
    assert not chooses(made, DATA, strategy=strategy)
    monkeypatch.setattr(compiled, "is_deterministic", lambda: True)
    assert not chooses(Forward(dense()), DATA)


def test_an_operation_without_a_kernel_is_named(gpu):
    def own(x, y):
        return {"loss": tf.ensure_shape(tf.py_function(lambda value: value[0, 0], [x], tf.float32), [])}

    loop = loops.Loop(own, DATA, steps_per_call=2)
    with pytest.warns(UserWarning, match="no kernel for EagerPyFunc.*It runs without XLA"):
        assert not compiles(loop)


def test_a_layer_that_says_no_is_named(gpu):
    model = dense(name="stubborn")
    model.layers[0].supports_jit = False
    with pytest.warns(UserWarning, match="its layer 'stubborn' says so"):
        assert not chooses(Forward(model), DATA)


def test_a_release_that_does_not_list_kernels_runs_without(gpu, monkeypatch):
    from tensorflow.python.framework import kernels

    monkeypatch.delattr(kernels, "get_registered_kernels_for_op")
    assert steps.not_for_xla(tf.function(lambda: tf.constant(1)).get_concrete_function()) is None
    with pytest.warns(UserWarning, match="does not list the kernels"):
        assert not compiles(loops.Loop(Forward(dense()), DATA, steps_per_call=1))


@pytest.mark.parametrize("value", [1, 0, None, "AUTO", "yes"])
def test_another_value_is_refused(value):
    with pytest.raises(scaler.InvalidArgument, match=r'expected True, False or "auto"'):
        loops.Loop(cheap, DATA, jit_compile=value)
