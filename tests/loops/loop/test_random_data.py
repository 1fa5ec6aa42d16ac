"""Guards what a resumed run sees of data that is random or in no order: the same, or a warning that names it."""

import functools

import keras
import pytest
import tensorflow as tf
from position_cases import numbers, resumed, shuffled, with_options

from loops.loop.state.position import Position

Dataset = tf.data.Dataset
UNSEEDED = "shuffled without a seed"
DRAWN = "random numbers without a seed"
UNORDERED = "in the order in which they are ready"
INSIDE = "DummySeedGenerator (a shuffle inside of a function"


def ignoring(dataset):
    return with_options(dataset, experimental_external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE)


def uniform(n):
    return tf.random.uniform([], 0, 999, tf.int64, seed=4) + 0 * n


def tenfold(n):
    return numbers(5).map(lambda m: 10 * n + m)


def odd(n):
    return tf.cast(n % 2, tf.int32)


def lines(place):
    for name in "abcdefg":
        (place / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(2)))
    return Dataset.list_files(str(place / "*.txt"), seed=1)


def sampled(*datasets, **options):
    return Dataset.sample_from_datasets(list(datasets), [0.5, 0.5], **options)


def from_generator_of_its_own():
    generator = tf.random.Generator.from_seed(3)
    return numbers().map(lambda n: generator.uniform([], 0, 999, tf.int64)).repeat()


def in_python(function):
    return numbers(60).map(lambda n: tf.ensure_shape(function(lambda x: x, [n], tf.int64), []))


def flipped():
    flip = keras.layers.RandomFlip(seed=1)
    images = numbers().map(lambda n: tf.reshape(tf.cast(tf.range(4 * n, 4 * n + 4), tf.float32), [2, 2, 1]))
    return images.batch(2).map(lambda batch: flip(batch, training=True)).repeat()


def captured(dataset):
    return numbers(50).flat_map(lambda n: dataset.map(lambda m: 100 * n + m))


def together(dataset, times):
    return functools.reduce(Dataset.concatenate, [dataset] * times)


def looked_up():
    keys = tf.range(10, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, 2 * keys), -1)
    return shuffled().repeat().map(table.lookup)


def unseeded():
    return numbers().shuffle(10)


EXACT = {
    "shuffle, seeded once": lambda place: (
        shuffled(seed=1, reshuffle_each_iteration=False).batch(3).prefetch(2).repeat()
    ),
    "shuffle after repeat, without a seed": lambda place: numbers().repeat().shuffle(7).batch(3),
    "shuffle in one epoch, without a seed": lambda place: numbers(100).shuffle(7).batch(3),
    "shuffle before a cache, without a seed": lambda place: unseeded().batch(3).cache().prefetch(4).repeat(),
    "shuffle below an endless repeat": lambda place: shuffled().repeat().batch(3).repeat(),
    "files listed, seeded": lambda place: lines(place).interleave(tf.data.TextLineDataset, cycle_length=2).repeat(),
    "random without a seed, endless": lambda place: Dataset.random().batch(3),
    "random anew each time, endless": lambda place: Dataset.random(seed=1, rerandomize_each_iteration=True).batch(3),
    "random inside of a function": lambda place: numbers(9).flat_map(lambda n: Dataset.random(seed=1).take(4)).repeat(),
    "stateless numbers beside a shuffle": lambda place: Dataset.zip((Dataset.counter(), shuffled().repeat())).map(
        lambda seed, n: n + tf.random.stateless_uniform([], [1, seed], 0, 999, tf.int64)
    ),
    "sampled without a seed, endless": lambda place: sampled(numbers().repeat(), numbers(5).repeat()),
    "ragged": lambda place: shuffled().repeat().map(tf.range).ragged_batch(3),
    "a table": lambda place: looked_up(),
    "a function said to have no state": lambda place: (
        shuffled()
        .repeat()
        .map(lambda n: tf.ensure_shape(tf.numpy_function(lambda n: n, [n], tf.int64, stateful=False), []))
    ),
    "nothing parallel, in no order": lambda place: with_options(shuffled().repeat().map(abs), deterministic=False),
    "a dataset of its own in a function": lambda place: captured(numbers(5).batch(2)),
    "one dataset in two places": lambda place: together(numbers(20).shuffle(20, seed=1), 2),
    "symbolic": lambda place: with_options(shuffled().repeat().batch(3), experimental_symbolic_checkpoint=True),
}


@pytest.fixture(autouse=True)
def without_a_global_seed():
    tf.random.set_seed(None)


@pytest.mark.parametrize("name", EXACT)
def test_what_goes_on_exactly_is_not_warned_about(name, tmp_path):
    found, caveats = resumed(lambda: EXACT[name](tmp_path))
    assert (all(found.values()), caveats) == (True, [])


SKIPPED = {
    "random anew each time": (
        lambda place: Dataset.random(seed=1, rerandomize_each_iteration=True).take(10).repeat().batch(3),
        "with take between random and repeat, TensorFlow forgets what later epochs draw. Draw with tf.random.stateless",
    ),
    "sampled to the end": (
        lambda place: sampled(numbers(), numbers(5), seed=1).prefetch(4).repeat(),
        "can hang once all of its datasets have ended",
    ),
    "files listed, then read": (
        lambda place: tf.data.TextLineDataset(lines(place)).prefetch(4).repeat(),
        "with text_line between shuffle and repeat",
    ),
    "shuffle inside of a function": (
        lambda place: numbers(9).interleave(lambda n: tenfold(n).shuffle(5, seed=1), cycle_length=2).repeat(),
        INSIDE,
    ),
    "cache inside of a function": (
        lambda place: numbers(9).flat_map(lambda n: tenfold(n).cache().repeat(2)).repeat(),
        "DummyMemoryCache (a cache inside of a function",
    ),
    "reduced inside of a function": (
        lambda place: numbers().map(lambda n: numbers(4).reduce(n, lambda total, m: total + m)).repeat(),
        "ReduceDataset",
    ),
    "shuffle outside of a function": (
        lambda place: captured(shuffled().batch(3)),
        "outside of a function, that of flat",
    ),
    "one shuffle in two places": (
        lambda place: together(numbers(40).shuffle(40, seed=1).batch(5), 4),
        "with batch between shuffle and concat",
    ),
    "numpy_function": (lambda place: in_python(tf.numpy_function), "PyFunc (from_generator or numpy_function)"),
    "py_function": (lambda place: in_python(tf.py_function), "EagerPyFunc (py_function)"),
    "a generator": (lambda place: from_generator_of_its_own(), "RngReadAndSkip"),
    "a random layer": (lambda place: flipped(), "ReadVariableOp (a map that reads a variable)"),
    "a seeded kernel": (lambda place: numbers(60).map(uniform), "RandomUniformInt (a map with random numbers)"),
}


@pytest.mark.slow_with("a random layer")
@pytest.mark.exhaustive_with("reduced inside of a function")
@pytest.mark.parametrize("name", SKIPPED)
def test_what_cannot_be_saved_is_named_and_skipped_to_exactly(name, tmp_path):
    make, named = SKIPPED[name]
    found, caveats = resumed(lambda: make(tmp_path))
    assert all(found.values())
    (caveat,) = caveats
    assert "cannot be saved" in caveat
    assert named in caveat


OTHER = {
    "shuffle once, without a seed": (
        lambda place: numbers(20).shuffle(7, reshuffle_each_iteration=False).repeat().batch(3),
        UNSEEDED,
    ),
    "shuffle without a seed": (lambda place: unseeded().repeat(), UNSEEDED),
    "shuffle without a seed, later": (lambda place: numbers(25).concatenate(numbers(90).shuffle(90)), UNSEEDED),
    "shuffle and repeat in one": (lambda place: numbers().apply(tf.data.experimental.shuffle_and_repeat(10)), UNSEEDED),
    "random": (lambda place: Dataset.random().take(10).repeat().batch(3), DRAWN),
    "random inside of a function": (lambda place: numbers(9).flat_map(lambda n: Dataset.random().take(5)), DRAWN),
    "sampled without a seed": (lambda place: sampled(numbers(50), numbers(50)).take(9).repeat(), DRAWN),
    "state ignored": (lambda place: ignoring(numbers(60).map(uniform)), "ignore the state of RandomUniformInt"),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_a_resumed_run_sees_otherwise_is_named(name, tmp_path):
    """That it does is shown, to be seen when mended."""
    make, named = OTHER[name]
    found, caveats = resumed(lambda: make(tmp_path))
    assert not all(found.values())
    assert sum(named in caveat for caveat in caveats) == 1
    assert all("cannot be saved" in caveat for caveat in caveats if named not in caveat)


IN_NO_ORDER = {
    "parallel_map": lambda: numbers(60).map(lambda n: n, 4, deterministic=False),
    "parallel_map by its options": lambda: with_options(numbers(60).map(lambda n: n, 4), deterministic=False),
    "parallel_interleave": lambda: numbers(60).interleave(tenfold, 3, num_parallel_calls=3, deterministic=False),
    "parallel_batch": lambda: numbers(60).batch(2, num_parallel_calls=3, deterministic=False),
    "parallel_map in a function": lambda: numbers(9).flat_map(lambda n: tenfold(n).map(abs, 2, deterministic=False)),
    "legacy_parallel_interleave": lambda: numbers(60).apply(
        tf.data.experimental.parallel_interleave(tenfold, cycle_length=2, sloppy=True)
    ),
}


@pytest.mark.parametrize("name", IN_NO_ORDER)
def test_an_order_that_no_two_runs_share_is_named(name):
    position = Position(IN_NO_ORDER[name]())
    position.probe()
    assert len(position.caveats) == 1
    assert f"{name.split()[0]} gives elements {UNORDERED}" in position.caveats[0]


def test_a_rejection_without_a_seed_is_named():
    rejecting = numbers().repeat().rejection_resample(odd, [0.3, 0.7], initial_dist=[0.5, 0.5])
    position = Position(rejecting)
    position.probe()
    assert sum("RandomUniform (a map with random numbers)" in caveat for caveat in position.caveats) == 1
    assert sum(DRAWN in caveat for caveat in position.caveats) == 1


def test_what_tensorflow_says_it_cannot_save_is_named():
    position = Position(numbers().apply(tf.data.experimental.copy_to_device("/cpu:0")))
    position.probe()
    assert "does not support checkpointing" in position.caveats[0]


def test_a_global_seed_is_a_seed():
    def make():
        tf.random.set_seed(0)
        return sampled(unseeded().repeat(), Dataset.random().take(10).map(lambda n: n % 9).repeat())

    found, caveats = resumed(make)
    assert (all(found.values()), caveats) == (True, [])
