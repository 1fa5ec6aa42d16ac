"""Guards what a step holds outside of variables: tables and iterators are saved, and all else is named."""

import contextlib
import gc
import re
import tempfile
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.backend import captured, steps
from loops.run.rewind import rewind

CPUS = ["CPU:0", "CPU:1"]


def numbers():
    return tf.data.Dataset.range(24).map(lambda n: tf.cast(n, tf.float32)).repeat().batch(4)


def counted(table, keys):
    """What a table has of keys, and then one more."""
    found = table.lookup(keys)
    with tf.control_dependencies([found]):
        table.insert(keys, found + 1.0)
    return tf.reduce_sum(found)


def ids(batch):
    return tf.cast(batch, tf.int64)


def mutable_table(value=0.0, key=tf.int64):
    return tf.lookup.experimental.MutableHashTable(key, tf.float32, value)


def with_mutable_table():
    table = mutable_table()
    return lambda batch: counted(table, ids(batch))


def with_dense_table():
    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, -1, -2)
    return lambda batch: counted(table, ids(batch))


def with_strings_and_vectors():
    table = mutable_table([0.0, 1.0], tf.string)
    return lambda batch: counted(table, tf.strings.as_string(ids(batch)))


def shuffled():
    return tf.data.Dataset.range(1000).map(lambda n: tf.cast(n, tf.float32)).shuffle(50, seed=1)


def with_iterator():
    iterator = iter(shuffled())
    return lambda batch: next(iterator)


def with_iterators():
    """Also one in a branch, beside a table of text."""
    in_a_branch, always = iter(shuffled().repeat()), with_iterator()
    words = with_strings_and_vectors()
    return lambda batch: tf.cond(batch[0] > 3.0, lambda: next(in_a_branch), lambda: 0.0) + always(batch) + words(batch)


def with_a_handle_alone():
    variable = tf.Variable(0.0)

    def step(batch):
        tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=batch[0])
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)

    step.keeps = variable
    return step


SAVED = {"MutableHashTable": with_mutable_table, "iterators": with_iterators, "handle alone": with_a_handle_alone}


def looping(make, folder=None, *, strategy=None, actions=(), **arguments):
    """A loop of a step whose decayed sum is its weight, and that weight."""
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        value_of, weight = make(), tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def step(batch):
        weight.assign(weight * 0.9 + tf.cast(value_of(batch), tf.float32))
        return {"loss": tf.identity(weight)}

    saves = [loops.Checkpoint(folder, every=5, resume=True)] if folder else []
    loop = loops.Loop(step, numbers(), strategy=strategy, actions=[*actions, *saves], **arguments)
    return loop, weight


def ended(make, *goals, folder=None, **arguments):
    """The weight after runs to the goals, each of which everything is made again for."""
    for goal in goals:
        loop, weight = looping(make, folder, **arguments)
        loop.run(goal)
    return weight.numpy().tobytes()


@pytest.mark.slow_with("iterators")
@pytest.mark.exhaustive_with("handle alone")
@pytest.mark.parametrize("kind", SAVED)
def test_what_can_be_saved_goes_on_bit_for_bit_without_a_warning(kind, tmp_path):
    make = SAVED[kind]
    whole = ended(make, 12, steps_per_call=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", loops.ResumeWarning)
        assert ended(make, 7, 12, folder=tmp_path, steps_per_call=3) == whole


@pytest.mark.slow
def test_a_table_that_replicas_share_goes_on_too(tmp_path):
    def run(*goals, **arguments):
        return ended(with_mutable_table, *goals, strategy=tf.distribute.MirroredStrategy(CPUS), **arguments)

    assert run(7, 12, folder=tmp_path) == run(12)


@pytest.mark.slow
def test_an_iterator_over_replicas_is_named():
    strategy = tf.distribute.MirroredStrategy(CPUS)

    def make():
        iterator = iter(strategy.experimental_distribute_dataset(shuffled().batch(2)))
        return lambda batch: tf.reduce_sum(iterator.get_next().values[0])

    assert any("iterator" in caveat for caveat in looping(make)[0].caveats())


# ---------------------------------------------------------------------------------------------- what is named


def sampling(batch):
    return tf.reduce_sum(
        tf.cast(tf.random.log_uniform_candidate_sampler(ids(batch)[:, None], 1, 5, True, 50)[0], float)
    )


def boxing(batch):
    return tf.reduce_sum(tf.image.sample_distorted_bounding_box([99, 99, 3], [[[0.1, 0.1, 0.9, 0.9]]], seed=3)[0])


def queueing():
    queue = tf.queue.FIFOQueue(100, [tf.float32], [[]])
    queue.enqueue_many([[0.0] * 9])
    return lambda batch: tf.cond(batch[0] >= 0.0, queue.dequeue, lambda: 0.0)


def starting(make):
    def with_dataset():
        dataset = make()
        return lambda batch: dataset.reduce(0.0, lambda total, number: total * 0.5 + number)

    return with_dataset


def calling(make):
    def with_iterator():
        iterator = iter(make())
        return lambda batch: tf.reduce_sum(next(iterator))

    return with_iterator


def generated():
    return tf.data.Dataset.from_generator(lambda: iter(np.arange(99.0)), output_signature=tf.TensorSpec([], tf.float32))


def writing_without_an_object():
    handle = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.float32, shared_name="held")

    def step(batch):
        tf.raw_ops.LookupTableInsertV2(table_handle=handle, keys=ids(batch), values=batch)
        return 0.0

    return step


NAMED = {
    "random numbers": (
        lambda: lambda batch: tf.cond(batch[0] > 3.0, lambda: tf.random.normal([]), lambda: 0.0),
        "RandomStandardNormal.*tf.random.Generator",
    ),
    "candidates": (lambda: sampling, "LogUniformCandidateSampler.* sampled_values to lose nothing"),
    "boxes": (lambda: boxing, "SampleDistortedBoundingBoxV2.*stateless_sample"),
    "queue": (queueing, "uses QueueDequeueV2, which may keep a state"),
    "numpy_function": (
        lambda: lambda batch: tf.numpy_function(np.sum, [batch], tf.float32),
        r"calls Python \(PyFunc\)",
    ),
    "py_function": (lambda: lambda batch: tf.py_function(lambda x: x[0], [batch], tf.float32), "EagerPyFunc"),
    "reshuffled dataset": (
        starting(lambda: shuffled().take(5)),
        r"draws other random numbers each time it starts \(shuffle\)",
    ),
    "generated dataset": (starting(generated), r"calls Python \(PyFunc\)"),
    "forgotten shuffle": (calling(lambda: shuffled().batch(4).repeat()), "with batch between shuffle and repeat"),
    "generating iterator": (calling(generated), "an iterator that the train step calls: its position cannot be saved"),
    "table without an object": (writing_without_an_object, "writes a table that cannot be saved"),
    "file": (lambda: lambda batch: [tf.io.write_file("/dev/null", "x"), 0.0][1], "uses WriteFile"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_what_cannot_be_saved_is_named(kind, monkeypatch):
    # A handle without an object is sought among all objects: here among those of the test.
    monkeypatch.setattr(gc, "get_freeze_count", int)
    make, said = NAMED[kind]
    (caveat,) = looping(make)[0].caveats()
    assert re.search(said, caveat)


def text():
    layer = keras.layers.TextVectorization(output_sequence_length=4)
    layer.adapt(["a b c", "b c"])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1.0]), 0.0)
    counts = mutable_table()  # One that is written, too.
    return lambda batch: (
        tf.reduce_sum(tf.cast(layer(tf.constant(["a c", "z"])), tf.float32))
        + tf.reduce_sum(table.lookup(tf.constant(["a", "b"])))
        + counted(counts, ids(batch))
    )


def saying():
    writer = tf.summary.create_file_writer(tempfile.mkdtemp())

    def step(batch):
        tf.print(batch, output_stream="file:///dev/null")
        tf.debugging.Assert(batch[0] > -1.0, [batch])
        tf.debugging.check_numerics(batch, "batch")
        with writer.as_default(step=1):
            tf.summary.write("loss", batch[0])
        return 0.0

    return step


def flowing(batch):
    found = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    for place in range(2):
        found = found.write(place, tf.reduce_sum(tf.map_fn(lambda x: 2 * x, batch)))
    total = tf.while_loop(lambda x: x > 1.0, lambda x: [x / 2], [tf.reduce_sum(found.stack())])[0]
    return tf.switch_case(tf.constant(1), [lambda: 0.0, lambda: total])


def drawing():
    own, of_keras = tf.random.Generator.from_seed(1), keras.random.SeedGenerator(1)
    return lambda batch: (
        own.normal([])
        + tf.cast(own.uniform([], 0, 5, tf.int32), tf.float32)
        + own.truncated_normal([])
        + keras.random.normal([], seed=of_keras)
        + keras.random.uniform([])
        + tf.random.stateless_uniform([], [1, 2])
    )


def layers():
    model = keras.Sequential(
        [
            keras.Input([4, 1]),
            keras.layers.GRU(2, dropout=0.2, recurrent_dropout=0.1),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.GaussianNoise(0.1),
            keras.layers.SpectralNormalization(keras.layers.Dense(1)),
        ]
    )
    return lambda batch: tf.reduce_sum(model(batch[None, :, None], training=True))


HEALTHY = {
    "constant tables beside one that is written": text,
    "print, assert and summary": saying,
    "generators": drawing,
    "layers": layers,
    "compiled": lambda: tf.function(flowing, jit_compile=False),
}


@pytest.mark.slow_with("constant tables beside one that is written")
@pytest.mark.parametrize("kind", HEALTHY)
def test_an_ordinary_step_is_warned_of_nothing(kind):
    assert looping(HEALTHY[kind])[0].caveats() == []


# ---------------------------------------------------------------------------------------------- folders


@pytest.mark.slow
def test_other_tables_are_those_of_another_run(tmp_path):
    looping(with_mutable_table, tmp_path)[0].run(2)
    with pytest.raises(loops.CheckpointError, match=r"MutableHashTable\(int64, float32\).*DenseHashTable"):
        looping(with_dense_table, tmp_path)[0].run(4)
    with pytest.raises(loops.CheckpointError, match="another train step"):
        looping(lambda: flowing, tmp_path)[0].run(4)


@pytest.mark.slow
def test_a_past_step_is_taken_again_from_the_same_tables_and_iterators(tmp_path):
    def make():
        parts = [with_mutable_table(), with_dense_table(), with_iterator()]
        return lambda batch: parts[0](batch) + parts[1](batch) + parts[2](batch)

    def build():
        return looping(make, tmp_path / "ckpt", actions=[loops.JsonLines(tmp_path / "steps.jsonl")])[0]

    build().run(12)
    moment = rewind(build(), 9)
    assert moment.reproduced
    losses = [float(moment.outputs()["loss"]) for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    assert float(moment.from_checkpoint(lambda loop: None)[-1]["loss"]) == losses[0]


# ---------------------------------------------------------------------------------------------- private names


def test_without_the_dataset_of_an_iterator_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(captured, "dataset_of", lambda iterator: None)
    with pytest.warns(loops.ResumeWarning, match="hides its dataset") as caught:
        looping(with_iterator, tmp_path)[0].run(2)
    assert len(caught) == 1


@pytest.mark.slow
def test_without_the_text_of_handles_tables_and_iterators_are_found_too(monkeypatch, tmp_path):
    monkeypatch.setattr(captured, "resource_type", lambda handle: None)
    assert looping(text)[0].caveats() == []
    assert ended(with_mutable_table, 3, 6, folder=tmp_path) == ended(with_mutable_table, 6)


def test_a_dataset_that_is_not_found_is_named(monkeypatch):
    """As after `gc.freeze`, which hides objects."""
    monkeypatch.setattr(gc, "get_objects", lambda generation: [])
    (caveat,) = looping(starting(shuffled))[0].caveats()
    assert "starts a dataset whose object cannot be found" in caveat


def test_without_the_registry_of_operations_a_run_is_told(monkeypatch):
    monkeypatch.setattr("loops.loop.state.resources.stateful", lambda kinds: None)
    (caveat,) = looping(with_a_handle_alone)[0].caveats()
    assert "does not say which operations of the train step have a state" in caveat
    assert steps.stateful({"Assert", "AddV2"}) == {"Assert"}


def test_what_was_frozen_is_found(monkeypatch):
    """It is in the second list: `tests/backend/test_living_objects.py` freezes."""
    table, variable = mutable_table(), tf.Variable(1.0)
    monkeypatch.setattr(scaler.authoring, "alive", lambda *kinds: iter([[], [table, variable]]))
    found = captured.owners([table.resource_handle, variable.handle])
    assert set(map(id, found.values())) == {id(table), id(variable)}
