"""Guards the table of tf.data's operations: a row is shown to be true by a pipeline that has the operation."""

import functools
import sqlite3

import pytest
import tensorflow as tf
from position_cases import forgotten, numbers, resumed, shuffled, take, with_options

from loops.backend.datasets import functions
from loops.loop.state.operations import OPERATIONS, Memory, kind, nodes, spelled
from loops.loop.state.pipeline import bottom_up, look
from loops.loop.state.position import Position

Dataset = tf.data.Dataset
experimental = tf.data.experimental


def twins(n):
    return Dataset.from_tensors(n).repeat(2)


def pairs(dataset):
    return dataset.map(lambda n: tf.stack([n, -n]))


def counted():
    zero = tf.constant(0, tf.int64)
    return experimental.Reducer(lambda key: zero, lambda state, n: state + n, lambda state: state)


def example(n):
    feature = {"n": tf.train.Feature(int64_list=tf.train.Int64List(value=[n]))}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def examples(dataset):
    lines = tf.constant([example(n) for n in range(10)])
    features = {"n": tf.io.FixedLenFeature([], tf.int64)}
    return dataset.map(lambda n: lines[n : n + 1]).apply(experimental.parse_example_dataset(features))


# Between a shuffle and a repeat, where a saved iterator has to hold the shuffle.
BETWEEN = {
    "AssertCardinality": lambda d: d.apply(experimental.assert_cardinality(10)),
    "Batch": lambda d: d.batch(3),
    "Cache": lambda d: d.cache(),
    "Concatenate": lambda d: d.concatenate(numbers(3)),
    "DenseToSparseBatch": lambda d: d.map(tf.range).apply(experimental.dense_to_sparse_batch(3, [10])),
    "DirectedInterleave": lambda d: Dataset.choose_from_datasets([d, numbers(4)], numbers(8).map(lambda n: n % 2)),
    "Filter": lambda d: d.filter(lambda n: n < 7),
    "FlatMap": lambda d: d.flat_map(twins),
    "GroupByReducer": lambda d: d.apply(experimental.group_by_reducer(lambda n: n % 4, counted())),
    "GroupByWindow": lambda d: d.group_by_window(lambda n: n % 2, lambda key, window: window.batch(3), 3),
    "IgnoreErrors": lambda d: d.ignore_errors(),
    "Interleave": lambda d: d.interleave(twins, cycle_length=2),
    "LegacyParallelInterleave": lambda d: d.apply(experimental.parallel_interleave(twins, cycle_length=2)),
    "Map": lambda d: d.map(lambda n: n + 1),
    "MapAndBatch": lambda d: d.apply(experimental.map_and_batch(lambda n: n, 3)),
    "Options": lambda d: with_options(d, deterministic=True),
    "PaddedBatch": lambda d: d.padded_batch(3),
    "ParallelBatch": lambda d: d.batch(3, num_parallel_calls=2),
    "ParallelInterleave": lambda d: d.interleave(twins, cycle_length=2, num_parallel_calls=2),
    "ParallelMap": lambda d: d.map(lambda n: n + 1, 3),
    "ParseExample": examples,
    "Prefetch": lambda d: d.prefetch(2),
    "Rebatch": lambda d: pairs(d).rebatch(3),
    "Repeat": lambda d: d.repeat(2),
    "Scan": lambda d: d.scan(tf.constant(0, tf.int64), lambda total, n: (total + n, total + n)),
    "Shard": lambda d: d.shard(2, 0),
    "Shuffle": lambda d: d.shuffle(4, seed=2),
    "ShuffleAndRepeat": lambda d: d.apply(experimental.shuffle_and_repeat(4, 2, seed=2)),
    "Skip": lambda d: d.skip(2),
    "Take": lambda d: d.take(7),
    "TakeWhile": lambda d: d.take_while(lambda n: n < 10),
    "Unbatch": lambda d: pairs(d).unbatch(),
    "Unique": lambda d: d.unique(),
    "Window": lambda d: d.window(2).interleave(lambda window: window.batch(2), cycle_length=1),
    "Zip": lambda d: Dataset.zip((d, numbers(20))),
}


def csv(place):
    (place / "n.csv").write_text("".join(f"{n}\n" for n in range(10)))
    return experimental.CsvDataset(str(place / "n.csv"), [tf.int64])


def records(place):
    with tf.io.TFRecordWriter(str(place / "n.records")) as writer:
        for n in range(10):
            writer.write(str(n).encode())
    return tf.data.TFRecordDataset(str(place / "n.records"))


def saved(place):
    if not (place / "saved").exists():
        numbers().save(str(place / "saved"))
    return Dataset.load(str(place / "saved"))


def sql(place):
    if not (place / "n.sqlite").exists():
        with sqlite3.connect(place / "n.sqlite") as database:
            database.execute("create table numbers (n integer)")
            database.executemany("insert into numbers values (?)", [(n,) for n in range(10)])
    return experimental.SqlDataset("sqlite", str(place / "n.sqlite"), "select n from numbers order by n", (tf.int64,))


SOURCES = {
    "Csv": csv,
    "FixedLengthRecord": lambda place: csv(place) and tf.data.FixedLengthRecordDataset(str(place / "n.csv"), 2),
    "List": lambda place: experimental.from_list([1, 2, 3, 4, 5]),
    "Load": saved,
    "Random": lambda place: Dataset.random(seed=1).take(10),
    "Range": lambda place: numbers(),
    "Sql": sql,
    "TFRecord": records,
    "Tensor": lambda place: Dataset.from_tensors([1, 2]),
    "TensorSlice": lambda place: Dataset.from_tensor_slices([1, 2, 3]),
    "TextLine": lambda place: csv(place) and tf.data.TextLineDataset(str(place / "n.csv")),
}
ELSEWHERE = {
    "DenseToRagged": "below the batch of ragged_batch",
    "DenseToRaggedBatch": "the same inside of a function",
    "Generator": "of from_generator: see test_positions.py",
    "Reduce": "inside of functions, where TensorFlow counts it as state: see test_random_data.py",
    "Restructured": "below unbatch and rebatch, no operation of its own",
    "Variant": "below sample_from_datasets: see test_random_data.py",
}


def checked(name, make):
    """What `resumed` finds of a pipeline that has an operation of this name."""
    made = []
    found = resumed(lambda: made.append(make()) or made[-1])
    assert name in kinds(made[0])
    return found


def kinds(dataset):
    found = set()
    for part in bottom_up(dataset):
        inside = [node.op for function in functions(part) for node in nodes(function.graph.as_graph_def())]
        found |= {kind(name) for name in (type(part).__name__, *inside)}
    return found


def test_every_row_of_the_table_has_a_pipeline():
    assert set(OPERATIONS) == {*BETWEEN, *SOURCES, *ELSEWHERE, "Snapshot"}
    assert {name for name, memory in OPERATIONS.items() if memory is Memory.SOURCE} - set(ELSEWHERE) == set(SOURCES)


def between(name):
    """A shuffle with an operation between it and `repeat`."""
    return BETWEEN[name](shuffled()).prefetch(4).repeat()


@pytest.mark.slow_with("GroupByReducer")
@pytest.mark.parametrize("name", [name for name in BETWEEN if OPERATIONS[name] in (Memory.KEEPS, Memory.AHEAD)])
def test_what_keeps_a_shuffle_goes_on_exactly_without_a_warning(name):
    found, caveats = checked(name, functools.partial(between, name))
    assert (all(found.values()), caveats) == (True, [])


@pytest.mark.exhaustive_with("FlatMap", "Unbatch")
@pytest.mark.parametrize("name", [name for name in BETWEEN if OPERATIONS[name] in (Memory.DRAINS, Memory.LETS_GO)])
def test_what_lets_go_of_a_shuffle_is_named_and_skipped_to(name):
    """The plain iterator is saved without an error and goes on differently: shown first, to be seen when mended."""
    make = functools.partial(between, name)
    # How far a thread has read ahead at a save is not ours to say: on a busy machine nothing may be forgotten once.
    assert any(forgotten(make, range(10, 20)) is not None for _ in range(3))
    found, caveats = checked(name, make)
    assert all(found.values())
    assert len(caveats) == 1
    named = "shuffle and prefetch" if OPERATIONS[name] is Memory.DRAINS else spelled(name)
    assert f"with {named} between shuffle and repeat, TensorFlow forgets" in caveats[0]


@pytest.mark.parametrize("name", SOURCES)
def test_what_reads_goes_on_exactly_without_a_warning(name, tmp_path):
    found, caveats = checked(name, lambda: SOURCES[name](tmp_path).batch(3).prefetch(2).repeat())
    assert (all(found.values()), caveats) == (True, [])


@pytest.mark.parametrize("what", ["snapshot", "cache in a file"])
def test_what_writes_files_is_named_and_skipped_to(what, tmp_path):
    dataset = shuffled()
    files = str(tmp_path / "files")
    dataset = dataset.snapshot(files) if what == "snapshot" else dataset.cache(files)
    written = take(iter(dataset), 20)
    position = Position(dataset.repeat())
    position.probe()
    assert f"{what} writes files" in position.problem
    assert len(position.caveats) == 1
    position.skip_to(4)
    assert take(position.iterator, 13) == (2 * written)[4:17]


def test_an_operation_that_nobody_tried_is_named():
    class _StrangeDataset(type(numbers().map(abs)).__mro__[1]):
        element_spec = tf.TensorSpec([], tf.int64)

    strange = numbers()
    position = Position(_StrangeDataset(strange, experimental.to_variant(strange)).repeat())
    position.probe()
    assert position.problem is None
    (caveat,) = position.caveats
    assert "uses Strange, whose saved position has not been verified" in caveat


@pytest.mark.parametrize("above", ["nothing", "batch"])
def test_what_a_pipeline_hides_is_found(above):
    """TensorFlow holds what it has rewritten as a value alone."""

    def make():
        inside = shuffled().batch(3) if above == "batch" else shuffled()
        return experimental.from_variant(experimental.to_variant(inside), inside.element_spec).prefetch(4).repeat()

    found, caveats = resumed(make)
    assert all(found.values())
    assert ["batch between shuffle and repeat" in caveat for caveat in caveats] == [True] * (above == "batch")


def chosen(dataset, choice=None):
    numbered = [dataset, Dataset.range(100, 120).repeat()]
    return Dataset.choose_from_datasets(numbered, choice or Dataset.range(2).repeat())


HIDDEN_AGAIN = {
    "choice": lambda: chosen(numbers().repeat(), Dataset.range(2).repeat(10).shuffle(20).repeat()).batch(3),
    "chosen": lambda: chosen(numbers().shuffle(20).repeat()).batch(3),
    "further up": lambda: chosen(numbers().shuffle(20).map(lambda n: n).batch(2).unbatch().repeat()),
    "returned": tf.function(lambda: numbers().shuffle(20).repeat().batch(3)),
    "returned, second of two": tf.function(lambda: numbers().concatenate(numbers().shuffle(20))),
    "returned, in a function": tf.function(lambda: numbers().flat_map(lambda n: Dataset.range(9).shuffle(9))),
    "from a variant": lambda: experimental.from_variant(
        experimental.to_variant(numbers().shuffle(20).repeat()), tf.TensorSpec([], tf.int64)
    ),
}
HIDDEN_ONCE = {
    "seeded": lambda: chosen(numbers().shuffle(20, seed=1).repeat()),
    "shuffled after its repeat": lambda: chosen(numbers().repeat().shuffle(20)),
    "one epoch": tf.function(lambda: numbers().shuffle(20).batch(3)),
    "repeated once": tf.function(lambda: numbers().shuffle(20).repeat(1)),
    "cached": tf.function(lambda: numbers().shuffle(20).cache().repeat()),
    "beside what repeats": tf.function(lambda: Dataset.zip((numbers().shuffle(20), Dataset.range(5).repeat()))),
    "first of two": tf.function(lambda: numbers().shuffle(20).concatenate(numbers())),
}


@pytest.mark.parametrize("name", [*HIDDEN_AGAIN, *HIDDEN_ONCE])
def test_a_hidden_shuffle_without_a_seed_is_found_if_it_starts_again(name):
    tf.random.set_seed(None)
    assert look((HIDDEN_AGAIN | HIDDEN_ONCE)[name]()).unseeded_again == ({"shuffle"} if name in HIDDEN_AGAIN else set())


@pytest.mark.exhaustive
def test_a_pipeline_deeper_than_the_stack_is_walked():
    dataset = numbers(1)
    for _ in range(1500):
        dataset = dataset.concatenate(numbers(1))
    assert len(bottom_up(dataset)) == 3001


def test_names_of_classes_and_kernels_are_one():
    for name in ("_MapDataset", "MapDataset", "MapDatasetV2", "ExperimentalMapDataset"):
        assert kind(name) == "Map"
    assert kind("ParallelInterleaveDatasetV4") == kind("_ParallelInterleaveDataset") == "ParallelInterleave"
    assert kind("ParallelInterleaveDataset") == kind("LegacyParallelInterleaveDatasetV2") == "LegacyParallelInterleave"
    assert kind("MatMul") is kind("DatasetCardinality") is None
