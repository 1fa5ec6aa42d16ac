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


def step(layer=None, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), layer or keras.layers.Dense(1, dtype="mixed_float16")])
    return loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.01), loss_scaler=scaler.LossScaler(), **options)


def cheap(x, y):
    return {"loss": tf.reduce_sum(x)}


def compiles(loop):
    loop.run(2)
    return loop.calls.jit_compile


@pytest.mark.slow_with("1")
@pytest.mark.exhaustive_with("2")
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_step_is_compiled_on_a_gpu(gpu, steps_per_call):
    loop = loops.Loop(step(), DATA, steps_per_call=steps_per_call)
    assert compiles(loop)
    named = loops.Loop(step(), DATA, steps_per_call=steps_per_call, jit_compile=True)
    assert compiles(named)
    weights = [one.train_step.model.trainable_variables[0].numpy() for one in (loop, named)]
    np.testing.assert_array_equal(*weights)


def test_a_step_in_16_bits_is_compiled_on_a_cpu_and_the_run_says_so_once():
    said = io.StringIO()
    loop = loops.Loop(step(), DATA, actions=[loops.Progress(console=rich.console.Console(file=said))])
    assert compiles(loop)
    loop.run(4)
    assert said.getvalue().count("Loop(jit_compile=False) leaves it as a graph") == 1


@pytest.mark.parametrize("made", [cheap, lambda: step(keras.layers.Dense(1))], ids=["no model", "float32"])
def test_another_step_is_not_compiled_on_a_cpu(made):
    said = io.StringIO()
    train_step = made if made is cheap else made()
    loop = loops.Loop(train_step, DATA, actions=[loops.Progress(console=rich.console.Console(file=said))])
    assert not compiles(loop)
    assert "XLA" not in said.getvalue()


def refused_by_xla(y, prediction):
    """A loss with a shape that depends on values, which has kernels and does not compile."""
    turns = tf.while_loop(
        lambda at, x: at < tf.cast(tf.reduce_sum(y), tf.int32), lambda at, x: (at + 1, x * 1.5), [0, prediction]
    )
    return tf.reduce_mean(tf.square(turns[1]))


def test_a_step_that_xla_refuses_runs_as_before_on_a_cpu():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, dtype="mixed_float16")])
    loop = loops.Loop(loops.TrainStep(model, refused_by_xla, keras.optimizers.SGD(0.01)), DATA)
    assert not compiles(loop)
    assert loop.counters.attempted == 2


def tokens(loss=None):
    """A step of a small model of words, and batches of four sentences."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(10, 4, dtype="mixed_float16"), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input([5], dtype="int32"), *layers, keras.layers.Dense(3, dtype="float32")])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loops.TrainStep(model, loss or cross_entropy, keras.optimizers.SGD(0.1), loss_scaler=scaler.LossScaler())


def sentences(words=(0, 1, 2, 9, -1), label=2):
    """Three right batches, and one with these words and this label."""
    right = np.array([[0, 1, 2, 9, -1]] * 4, np.int32), np.array([0, 1, 2, 2])
    other = np.array([[0, 1, 2, 3, 4]] * 3 + [list(words)], np.int32), np.array([0, 1, 2, label])
    parts = [np.stack([one] * 3 + [last]) for one, last in zip(right, other, strict=True)]
    return tf.data.Dataset.from_tensor_slices(tuple(parts)).repeat()


@pytest.mark.dear("XLA compiles a step of three kinds of batches")
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"words": (0, 1, 2, 3, 10)}, "an index in the batch is 10, but the model has 10 rows for it, 0 to 9."),
        ({"words": (0, 1, 2, 3, -11)}, "an index in the batch is -11, but the model has 10 rows for it"),
        ({"label": 3}, "a label is 3, but the model has 3 classes, 0 to 2."),
    ],
    ids=["index", "negative index", "label"],
)
def test_indices_outside_of_their_range_are_refused_as_in_a_graph(batch, said):
    loop = loops.Loop(tokens(), sentences(**batch))
    with pytest.raises(loops.BadBatch, match=re.escape(said)):
        loop.run(6)
    assert loop.calls.jit_compile
    assert loop.counters.applied == 3


def asserts(y, prediction):
    tf.debugging.assert_less(tf.reduce_sum(prediction), 1e9)
    return tf.reduce_mean(prediction)


def unknown_labels(y, prediction):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.abs(y), prediction))


def size_of_data(y, prediction):
    return tf.reduce_mean(prediction[: tf.reduce_max(y) + 1])


def draws(y, prediction):
    return tf.reduce_mean(prediction) * tf.random.uniform([])


@pytest.mark.parametrize("loss", [asserts, unknown_labels, size_of_data, draws])
def test_a_step_of_which_xla_would_leave_something_out_runs_in_a_graph(loss):
    loop = loops.Loop(tokens(loss), sentences())
    assert not compiles(loop)
    assert loop.counters.attempted == 2


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_step_that_xla_refuses_in_the_end_takes_each_batch_once(monkeypatch, steps_per_call):
    """As XLA refuses a bilinear resize behind an activation in 16 bits, once it compiles it."""
    seen = []
    layers = [keras.layers.Conv2D(2, 3, activation="relu"), keras.layers.UpSampling2D(2, interpolation="bilinear")]
    for layer in layers:
        layer.dtype_policy = "mixed_float16"
    model = keras.Sequential([keras.Input([6, 6, 1]), *layers, keras.layers.Conv2D(1, 1, dtype="mixed_float16")])
    step = loops.TrainStep(model, lambda y, p: tf.reduce_mean(tf.cast(p, tf.float32)), keras.optimizers.SGD(0.1))

    def data():
        for number in range(6):
            yield np.full([2, 6, 6, 1], number, np.float32), np.full([2, 1], number, np.float32)

    def note(visit):
        seen.extend(visit.outputs["first"].tolist())

    def first(batch):
        return {**step(batch), "first": batch[1][0, 0], "kernel": tf.reduce_sum(model.layers[0].kernel)}

    spec = tf.TensorSpec([2, 6, 6, 1]), tf.TensorSpec([2, 1])
    dataset = tf.data.Dataset.from_generator(data, output_signature=spec)
    monkeypatch.setattr(calls, "may_compile", lambda *_: True)
    loop = loops.Loop(first, dataset, steps_per_call=steps_per_call, actions=[note])
    loop.run(5)
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]
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


def test_rows_that_a_function_of_the_dataset_changes_are_not_compiled_on_a_cpu():
    some = DATA.map(lambda x, y: (x[:3], y[:3]))
    assert some.element_spec[0].shape[0] is None
    assert not compiles(loops.Loop(step(), some))
    after = DATA.take(9).prefetch(1).repeat()
    assert compiled.has_steady_rows(after)
    assert compiles(loops.Loop(step(), after))


def test_a_model_that_is_not_built_yet_is_compiled_at_once():
    model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
    assert compiles(loops.Loop(loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.01)), DATA))


def test_batches_of_many_lengths_are_not_compiled_on_a_cpu():
    lengths = tf.data.Dataset.range(2, 10).map(lambda length: (tf.ones([4, length, 3]), tf.ones([4, length, 1])))
    lengths = lengths.map(lambda *batch: batch).repeat()
    data = lengths.ragged_batch(1).map(lambda x, y: (x.to_tensor()[0], y.to_tensor()[0]))
    model = keras.Sequential([keras.Input([None, 3]), keras.layers.Dense(1, dtype="mixed_float16")])
    assert not compiles(loops.Loop(loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.01)), data))


@pytest.mark.dear("three loops are traced, of which XLA compiles two")
@pytest.mark.parametrize("saved", [True, False])
def test_a_run_goes_on_as_it_began(tmp_path, monkeypatch, saved):
    def loop(chosen):
        monkeypatch.setattr(calls, "may_compile", lambda *_: chosen)
        return loops.Loop(step(), DATA, actions=[loops.Checkpoint(tmp_path, every=2, resume=True)])

    assert compiles(loop(saved)) == saved
    resumed = loop(not saved)
    resumed.run(4)
    assert resumed.calls.jit_compile == saved
    meant = loops.Checkpoint(tmp_path, every=2, resume=True, changed=["jit_compile"])
    another = loops.Loop(step(), DATA, actions=[meant], jit_compile=not saved)
    another.run(6)
    assert another.calls.jit_compile != saved
    assert "jit_compile" in another.resumed.changes[0]


def test_what_was_asked_for_is_done(gpu):
    assert compiles(loops.Loop(cheap, DATA, steps_per_call=1))
    assert not compiles(loops.Loop(cheap, DATA, steps_per_call=1, jit_compile=False))


def test_a_step_that_compiles_its_passes_is_left_alone(gpu):
    assert not compiles(loops.Loop(step(jit_compile=True), DATA, steps_per_call=1))


@pytest.mark.slow
def test_replicas_and_determinism_are_as_in_fit(gpu, monkeypatch):
    strategy = mirrored(2)
    with strategy.scope():
        made = step()
    assert not compiles(loops.Loop(made, DATA, strategy=strategy))
    monkeypatch.setattr(compiled, "is_deterministic", lambda: True)
    assert not compiles(loops.Loop(step(), DATA))


def test_an_operation_without_a_kernel_is_named(gpu):
    def own(x, y):
        return {"loss": tf.ensure_shape(tf.py_function(lambda value: value[0, 0], [x], tf.float32), [])}

    loop = loops.Loop(own, DATA, steps_per_call=2)
    with pytest.warns(UserWarning, match="no kernel for EagerPyFunc.*It runs without XLA"):
        assert not compiles(loop)
    assert loop.counters.data == 2


def test_a_layer_that_says_no_is_named(gpu):
    layer = keras.layers.Dense(1, name="stubborn")
    layer.supports_jit = False
    with pytest.warns(UserWarning, match="its layer 'stubborn' says so"):
        assert not compiles(loops.Loop(step(layer=layer), DATA, steps_per_call=1))


@pytest.mark.slow
def test_a_release_that_does_not_list_kernels_runs_without(gpu, monkeypatch):
    from tensorflow.python.framework import kernels

    monkeypatch.delattr(kernels, "get_registered_kernels_for_op")
    assert steps.not_for_xla(tf.function(lambda: tf.constant(1)).get_concrete_function()) is None
    with pytest.warns(UserWarning, match="does not list the kernels"):
        assert not compiles(loops.Loop(step(), DATA, steps_per_call=1))


@pytest.mark.parametrize("value", [1, 0, None, "AUTO", "yes"])
def test_another_value_is_refused(value):
    with pytest.raises(scaler.InvalidArgument, match=r'expected True, False or "auto"'):
        loops.Loop(step(), DATA, jit_compile=value)
