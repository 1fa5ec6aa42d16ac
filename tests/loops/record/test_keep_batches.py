"""Guards that a run keeps the batches that it took, that a replay takes these, and that whatever they lack is told."""

import itertools
import shutil

import numpy as np
import pytest
import rewind_cases
import tensorflow as tf
from processes import kill_when
from rewind_cases import listing, plain

import loops
import scaler
from loops.loop import kept_batches
from loops.loop.state import folder
from loops.run.rewind import batches as held
from loops.run.rewind import read_log, rewind

STARTS = itertools.count()
NUMBER = tf.TensorSpec([], tf.int64)
pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be saved:loops.ResumeWarning")


def fresh():
    """Numbers that are others each time the dataset is started."""

    def numbers():
        random = np.random.default_rng(next(STARTS))
        while True:
            yield random.integers(1000)

    return tf.data.Dataset.from_generator(numbers, output_signature=NUMBER)


def build(run, *, keep=True, last=100, dataset=None, every=4, steps_per_call=1, **arguments):
    """A step whose weight is the decayed sum of the numbers that it was given; the batches are kept first of all."""
    total = tf.Variable(0.0)

    def step(number):
        total.assign(total * 0.9 + tf.reduce_max(tf.cast(number, tf.float32)))
        return {"loss": tf.identity(total)}

    actions = [loops.KeepBatches(run / "batches", last=last)] if keep else []
    actions += [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "ckpt", every=every, keep=4, resume=True)]
    dataset = fresh() if dataset is None else dataset
    return loops.Loop(step, dataset, steps_per_call=steps_per_call, actions=actions, **arguments)


def stored(run):
    return kept_batches.KeptBatches(run / "batches", NUMBER)


def steps_kept(run):
    found = stored(run)
    return [step for step in range(100) if found.has(step - 1, step)]


def logged(run):
    return {row["step"]: row["loss"] for row in read_log(run / "steps.jsonl")}


def tear(run, step):
    (path,) = (path for path in (run / "batches").iterdir() if kept_batches._step_of(path) == step)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Eleven steps in calls of four, of which the last six batches are kept."""
    run = tmp_path_factory.mktemp("once")
    build(run, last=6, steps_per_call=4).run(11)
    return run


@pytest.fixture
def copied(once, tmp_path):
    return shutil.copytree(once, tmp_path / "copied")


# ---------------------------------------------------------------------------------------------- replays


@pytest.mark.slow_with("1")
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_replay_takes_the_batches_of_the_run(tmp_path, steps_per_call):
    build(tmp_path, steps_per_call=steps_per_call).run(11)
    before, losses = listing(tmp_path), logged(tmp_path)
    for step, began_at in ((3, 0), (10, 8)):
        moment = rewind(build(tmp_path, steps_per_call=steps_per_call), step)
        assert (moment.reproduced, moment.differs, moment.began_at) == (True, None, began_at)
        assert plain(moment.batch) == plain(stored(tmp_path).get(step))
        assert plain(moment.next_batch) == plain(stored(tmp_path).get(step + 1))
        again = [float(one["loss"]) for one in moment.from_checkpoint(lambda loop: None)]
        assert again == [losses[number] for number in range(began_at + 1, step + 1)]
    assert listing(tmp_path) == before


def test_without_them_the_replay_is_not_the_run_and_the_way_out_is_told(once):
    moment = rewind(build(once, keep=False), 10)
    assert moment.differs.startswith("Loss of step 9 was")
    assert "cannot be saved: " in moment.differs
    assert moment.differs.endswith("An hs.KeepBatches(directory) among the actions keeps the batches from now on.")


def test_only_the_last_are_kept_and_a_replay_begins_where_they_do(once):
    assert len(list((once / "batches").iterdir())) == 6
    assert steps_kept(once) == [6, 7, 8, 9, 10, 11]
    moment = rewind(build(once, last=6), 11, at_least=10)
    assert (moment.differs, moment.began_at) == (None, 8)


def test_a_replay_of_steps_that_are_kept_no_more_is_not_the_run(once):
    moment = rewind(build(once, last=6), 8)
    assert (moment.reproduced, moment.began_at) == (False, 4)
    assert plain(moment.batch) == plain(stored(once).get(8))
    said = f"The batch of step 5 came from the dataset: {once / 'batches'} holds the last 6 of the run, and a damaged"
    assert said in moment.differs
    assert "cannot be saved: " in moment.differs


def test_a_used_loop_takes_nothing_into_the_folder(tmp_path):
    """Also not one that ran."""
    loop = build(tmp_path, steps_per_call=2)
    loop.run(6)
    before = listing(tmp_path / "batches")
    assert rewind(loop, 6).reproduced
    assert listing(tmp_path / "batches") == before


@pytest.mark.slow
def test_batches_on_disk_take_no_memory(once, monkeypatch):
    monkeypatch.setattr(held, "_MOST_BYTES", 0)
    moment = rewind(build(once, last=6), 10)
    assert [float(one["loss"]) for one in moment.from_checkpoint(lambda loop: None)][-1] == logged(once)[10]


@pytest.mark.slow
def test_a_shuffle_without_a_seed_is_had_again_from_the_beginning(tmp_path):
    tf.random.set_seed(None)
    data = [tf.data.Dataset.range(1, 41).shuffle(40) for _ in range(3)]
    with pytest.warns(loops.ResumeWarning, match="shuffled without a seed"):
        build(tmp_path, dataset=data[0].repeat(), every=100).run(5)
    assert rewind(build(tmp_path, dataset=data[1].repeat(), every=100), 4).differs is None
    assert "shuffled without" in rewind(build(tmp_path, dataset=data[2].repeat(), every=100, keep=False), 4).differs


def test_a_dataset_that_goes_back_is_asked_itself(tmp_path):
    """Its position is saved as without the action, and what is kept is not needed."""
    data = tf.data.Dataset.range(1, 41).shuffle(20, seed=1)
    build(tmp_path, dataset=data, steps_per_call=2).run(7)
    assert folder.newest_whole(tmp_path / "ckpt")[1]["data"]["problem"] is None
    tear(tmp_path, 6)
    assert rewind(build(tmp_path, dataset=data, steps_per_call=2), 6).reproduced


@pytest.mark.exhaustive
def test_a_run_is_the_same_bit_for_bit(tmp_path):
    """With and without: what is written, and the position that is saved."""
    for keep in (False, True):
        run = tmp_path / str(keep)
        run.mkdir()
        loop = rewind_cases.stateful(run)
        loop.actions += [loops.KeepBatches(run / "batches")] if keep else []
        loop.run(9)
    rows = [read_log(tmp_path / str(keep) / "steps.jsonl") for keep in (False, True)]
    assert rows[0] == rows[1]
    assert len(list((tmp_path / "True" / "batches").iterdir())) == 9
    saved = [tf.train.load_checkpoint(str(tmp_path / str(keep) / "ckpt" / "ckpt-9")) for keep in (False, True)]
    names = [name for name, dtype in saved[0].get_variable_to_dtype_map().items() if dtype.is_floating]
    assert len(names) > 10
    assert all(saved[0].get_tensor(name).tobytes() == saved[1].get_tensor(name).tobytes() for name in names)


# ---------------------------------------------------------------------------------------------- resumes and kills


@pytest.mark.slow_with("1")
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_resumed_run_goes_on_with_the_numbers_of_its_steps(tmp_path, steps_per_call):
    """It was killed at step 7, and takes 5 to 7 again, with other data."""
    build(tmp_path, last=8, steps_per_call=steps_per_call).run(7)
    for path in (tmp_path / "ckpt").glob("ckpt-7*"):
        path.unlink()
    lost = plain(stored(tmp_path).get(6))
    (tmp_path / "batches" / "batch-3").write_bytes(b"123 4")
    saved = folder.numbers(tmp_path / "ckpt")[0]
    resumed = build(tmp_path, last=8, steps_per_call=steps_per_call)
    resumed.run(saved + 1)
    assert steps_kept(tmp_path) == [step for step in range(1, saved + 2) if step != 3]
    resumed.run(10)
    assert plain(stored(tmp_path).get(saved + 1)) != lost
    assert steps_kept(tmp_path) == [4, 5, 6, 7, 8, 9, 10]
    assert rewind(build(tmp_path, last=8), 10).reproduced


def test_a_torn_batch_is_noticed(copied):
    tear(copied, 10)
    assert stored(copied).get(10) is None
    assert "The batch of step 10 came from the dataset" in rewind(build(copied, last=6), 10).differs


@pytest.mark.parametrize("place", [0, 25, -1])
def test_a_bit_that_is_another_is_noticed(copied, place):
    (path,) = (path for path in (copied / "batches").iterdir() if kept_batches._step_of(path) == 11)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert stored(copied).get(11) is None
    assert stored(copied).get(10) is not None


def large(run):
    """Batches of 32 megabytes, so that a kill finds one half written."""
    return build(run, dataset=fresh().map(lambda number: tf.fill([2**22], number)), last=3, every=2, steps_per_call=2)


def keep_large_batches(run):
    large(run).run(10**6)


def killed_while_it_writes(run):
    """Kills a run when a file is there that is shorter than others are in the end; the files that stay so."""

    def half_written():
        sizes = [path.stat().st_size for path in (run / "batches").glob("batch-*")]
        return [size for size in sizes if size < 2**25]

    kill_when(lambda: folder.numbers(run / "ckpt") and half_written(), keep_large_batches, run)
    return half_written()


@pytest.mark.exhaustive
def test_a_kill_in_the_middle_of_a_batch_loses_that_batch_alone(tmp_path):
    torn = next(found for _ in range(5) if (found := killed_while_it_writes(tmp_path)))
    assert len(torn) == 1
    spec = tf.TensorSpec([2**22], tf.int64)
    steps = [kept_batches._step_of(path) for path in (tmp_path / "batches").glob("batch-*")]
    found = [kept_batches.KeptBatches(tmp_path / "batches", spec).get(step) for step in steps if step is not None]
    whole = [batch for batch in found if batch is not None]
    assert len(whole) == len(steps) - 1
    assert all(int(tf.reduce_min(batch)) == int(tf.reduce_max(batch)) for batch in whole)
    saved = folder.numbers(tmp_path / "ckpt")[0]
    large(tmp_path).run(saved + 3)
    assert rewind(large(tmp_path), saved + 2).differs is None
    shutil.rmtree(tmp_path / "batches")


def test_batches_of_another_dataset_are_not_taken(once):
    assert stored(once).get(11) is not None
    other = tf.data.Dataset.from_tensors((1.0, 2.0)).element_spec
    assert kept_batches.KeptBatches(once / "batches", other).get(11) is None


def test_a_run_that_begins_anew_removes_those_of_the_one_before(tmp_path):
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "batch-notes.txt").touch()
    build(tmp_path).run(3)
    for path in (tmp_path / "ckpt").iterdir():
        path.unlink()
    build(tmp_path).run(1)
    assert steps_kept(tmp_path) == [1]
    assert (tmp_path / "batches" / "batch-notes.txt").exists()


# ---------------------------------------------------------------------------------------------- what a batch may be


def of_all_kinds():
    ragged = tf.ragged.constant([[[1, 2], []], [[3]]])
    return {
        "text": tf.constant([["é", ""], ["a\n b", "\0"]]),
        "ragged": (ragged, tf.ragged.constant([[1.5], []])),
        "sparse": tf.sparse.from_dense([[0.0, np.nan], [-0.0, 5.0]]),
        "numbers": tuple(tf.cast([1.0, 2.0], dtype) for dtype in (tf.bfloat16, tf.float16, tf.complex64, tf.uint8)),
        "empty": tf.zeros([2, 0, 3]),
        "flag": tf.constant([True, False]),
    }


@pytest.mark.slow
def test_every_kind_of_batch_comes_back_bit_for_bit(tmp_path):
    batch = of_all_kinds()
    dataset = tf.data.Dataset.from_tensors(batch).map(lambda part: (part, None))
    (given,) = dataset
    assert kept_batches.writable(dataset.element_spec)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def write(step):
        kept_batches.write(tmp_path, given, step, last=3, element_spec=dataset.element_spec)

    write(5)
    assert [path.name for path in tmp_path.iterdir()] == ["batch-2"]
    found = kept_batches.KeptBatches(tmp_path, dataset.element_spec).get(5)
    tf.nest.assert_same_structure(found, given, expand_composites=True)
    pairs = zip(*(tf.nest.flatten(one, expand_composites=True) for one in (found, given)), strict=True)
    for one, other in pairs:
        assert (one is None and other is None) or one.dtype == other.dtype
        assert one is None or tf.io.serialize_tensor(one) == tf.io.serialize_tensor(other)


# ---------------------------------------------------------------------------------------------- what is refused


def test_arguments_that_cannot_work():
    with pytest.raises(scaler.InvalidArgument, match=r"KeepBatches\(last=0\): expected an integer of at least 1"):
        loops.KeepBatches("batches", last=0)
    with pytest.raises(scaler.InvalidArgument, match=r"KeepBatches\(directory=3\): expected a path"):
        loops.KeepBatches(3)


def test_loops_that_it_does_not_fit(tmp_path):
    data = fresh().batch(4, drop_remainder=True)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(loops.LoopError, match="KeepBatches: the loop has 2 replicas"):
        build(tmp_path, dataset=data, strategy=strategy).run(1)
    with pytest.raises(loops.LoopError, match="a part that is not a tensor of values"):
        build(tmp_path, dataset=tf.data.Dataset.range(9).window(3)).run(1)
    loop = build(tmp_path)
    loop.actions.append(loops.KeepBatches(tmp_path / "more"))
    with pytest.raises(loops.LoopError, match="more than one KeepBatches"):
        loop.run(1)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_cannot_be_written_ends_the_run_before_its_step(tmp_path):
    (tmp_path / "batches" / "batch-3").mkdir(parents=True)
    loop = build(tmp_path, steps_per_call=4)
    with pytest.raises(loops.LoopError, match=r"KeepBatches: a batch could not be written \(.*batch-3.*\)\. Its step"):
        loop.run(4)
    assert loop.counters.data == 2
    (tmp_path / "batches" / "batch-3").rmdir()
    loop.run(4)
    assert steps_kept(tmp_path) == [1, 2, 3, 4]
