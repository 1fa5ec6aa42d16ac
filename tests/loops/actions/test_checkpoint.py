"""Guards the folder of checkpoints: when it is written, damage, a full disk, leftovers, and what is refused by name."""

import json
import re
import resource
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_cases import Counting, training, twelve_steps
from models import plain_model

import loops
import scaler
from loops.loop.state import folder
from loops.loop.state.compared import check_identity


@pytest.fixture(autouse=True)
def _eagerly(request):
    """What is saved does not depend on who takes the steps: nothing is traced for them, but where a graph is asked."""
    tf.config.run_functions_eagerly("in_a_graph" not in request.fixturenames)


@pytest.fixture
def in_a_graph():
    """Has the steps be taken in a graph."""


@pytest.fixture(scope="module")
def saved_eight(tmp_path_factory):
    """Where a run of eight steps was saved."""
    keras.utils.set_random_seed(0)  # As before each test, which this comes before.
    place = tmp_path_factory.mktemp("eight")
    Counting(place).go(8)
    return place


@pytest.fixture
def eight(saved_eight, tmp_path):
    return shutil.copytree(saved_eight, tmp_path / "a")


def test_it_saves_each_multiple_and_at_the_end_and_keeps_the_newest(tmp_path):
    run = Counting(tmp_path / "a", every=3, keep=2)
    saved = []
    run.loop.actions.append(lambda visit: saved.append(folder.numbers(tmp_path / "a")))
    run.go(10)
    # What actions see is from before this visit's save, which comes last wherever the checkpoint stands in the list.
    assert saved == [[], [], [], [3], [3], [3], [6, 3], [6, 3], [6, 3], [9, 6]]
    assert folder.numbers(tmp_path / "a") == [10, 9]
    assert tf.train.latest_checkpoint(str(tmp_path / "a")) == str(tmp_path / "a" / "ckpt-10")


@pytest.mark.usefixtures("in_a_graph")
def test_calls_that_step_over_multiples_save_at_their_end(tmp_path):
    Counting(tmp_path, every=3, keep=9, steps_per_call=4).go(14)
    assert folder.numbers(tmp_path) == [14, 12, 8, 4]


def test_a_finished_run_goes_on_to_nothing_or_further(tmp_path):
    Counting(tmp_path / "a", resume=True).go(6)  # In an empty folder it begins anew.
    before = (tmp_path / "a" / "ckpt-6.index").stat().st_mtime_ns
    assert Counting(tmp_path / "a", resume=True).go(6).loop.counters.data == 6
    assert (tmp_path / "a" / "ckpt-6.index").stat().st_mtime_ns == before
    assert Counting(tmp_path / "a", resume=True).go(12).bits() == twelve_steps()
    with pytest.raises(scaler.InvalidArgument, match=r"run\(5\): this loop has already taken 12 steps"):
        Counting(tmp_path / "a", resume=True).go(5)


def damage(path, how):
    data = path.read_bytes()
    middle = len(data) // 2
    if how == "flipped":
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: {"half": middle, "short": len(data) - 1}[how]])


DATA = "data-00000-of-00001"


@pytest.mark.parametrize(
    ("part", "how", "numbers"),
    [("index", "short", [8]), ("index", "gone", [8]), (DATA, "flipped", [8]), (DATA, "half", [8, 6])],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(eight, part, how, numbers):
    for number in numbers:
        damage(eight / f"ckpt-{number}.{part}", how)
    run = Counting(eight, resume=True)
    if (part, how) == ("index", "gone"):  # Without an index there is no checkpoint, only a leftover.
        run.go(7)
        assert not (eight / f"ckpt-8.{DATA}").exists()
    else:
        whole = min(numbers) - 2
        with pytest.warns(loops.ResumeWarning, match=rf"is damaged \(.+\); going on from step {whole}") as caught:
            run.go(7)
        assert len(caught) == len(numbers)
        assert [path.name for path in eight.glob("damaged-ckpt-8.*")]
    assert 8 not in folder.numbers(eight)
    assert run.go(12).bits() == twelve_steps()


def test_when_none_is_whole_nothing_is_touched(eight):
    for number in folder.numbers(eight):
        damage(eight / f"ckpt-{number}.{DATA}", "flipped")
    before = sorted(path.name for path in eight.iterdir())
    run = Counting(eight, resume=True)
    with pytest.raises(loops.CheckpointError, match="none of its checkpoints can be read") as caught:
        run.go(12)
    for text in ("step 8: ", "step 6: ", "step 4: ", "remove them"):
        assert text in str(caught.value)
    assert "{{" not in str(caught.value)
    assert sorted(path.name for path in eight.iterdir()) == before
    assert run.loop.counters == loops.Counters()


def test_leftovers_of_a_killed_save_are_swept_and_other_files_are_not(eight):
    (eight / "ckpt-10_temp").mkdir()
    (eight / "ckpt-10_temp" / f"part-00000-of-00001.{DATA}").write_bytes(b"torn")
    for name in (f"ckpt-10.{DATA}", "checkpoint.tmp123", "ckpt-12.index.tempstate456"):
        (eight / name).write_bytes(b"torn")
    (eight / "notes.txt").write_text("mine")
    (eight / "checkpoint").write_text("torn")
    run = Counting(eight, resume=True).go(9)
    left = {path.name for path in eight.iterdir()}
    saved = {f"ckpt-{number}.{part}" for number in (6, 8, 9) for part in ("index", DATA)}
    assert left == {"checkpoint", "notes.txt", *saved}
    assert run.go(12).bits() == twelve_steps()
    assert folder.numbers(eight) == [12, 10, 9]


def test_a_checkpoint_too_many_is_removed_also_where_nothing_is_left_to_do(tmp_path):
    Counting(tmp_path, keep=4).go(8)
    Counting(tmp_path, keep=3, resume=True).go(8)
    assert folder.numbers(tmp_path) == [8, 6, 4]
    assert not (tmp_path / "ckpt-2.data-00000-of-00001").exists()


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_one_error_and_leaves_the_checkpoints_before_it(tmp_path, background):
    place = tmp_path / "a"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(visit):
        if visit.counters.data == 7:
            run.checkpoint.wait()
            # Every file may grow to so many bytes only, as on a disk that has no more.
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))

    run = Counting(place, actions=[fill], background=background)
    try:
        with pytest.raises(loops.CheckpointError, match=r"step 8 could not be saved \(.+\).*make room") as caught:
            run.go(12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(place) in str(caught.value)
    assert folder.numbers(place) == [6, 4, 2]
    assert not [path.name for path in place.iterdir() if "temp" in path.name or "ckpt-8" in path.name]
    assert Counting(place, resume=True).go(12).bits() == twelve_steps()


def test_an_action_that_raises_stops_a_run_that_is_saved(tmp_path):
    seen = []

    def fail(visit):
        if visit.counters.data == 5:
            raise ValueError("of the user")

    run = Counting(tmp_path / "a", actions=[fail, lambda visit: seen.append(visit.counters.data)])
    with pytest.raises(ValueError, match="of the user"):
        run.go(12)
    assert seen == [1, 2, 3, 4, 5]
    assert folder.numbers(tmp_path / "a")[0] == 5
    assert Counting(tmp_path / "a", resume=True).go(12).bits() == twelve_steps()


def test_a_step_that_raises_saves_nothing(tmp_path):
    run = Counting(tmp_path)
    run.go(3)

    def broken(iterator, limit):
        raise tf.errors.InternalError(None, None, "broken")

    run.loop.calls._take = broken
    with pytest.raises(tf.errors.InternalError):
        run.go(12)
    assert folder.numbers(tmp_path) == [3, 2]


def test_a_folder_with_checkpoints_is_not_written_over(tmp_path):
    Counting(tmp_path).go(4)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(loops.CheckpointError, match=r"checkpoints of a run at step 4.*resume=True.*another folder"):
        Counting(tmp_path).go(4)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


NUMBERS = [(name, value) for name in ("every", "keep") for value in (0, -1, 1.5, True, "3", None)]


@pytest.mark.parametrize(("name", "value"), [*NUMBERS, ("keep", 1)])
def test_arguments_that_cannot_work_are_named(tmp_path, name, value):
    least = {"every": 1, "keep": 2}[name]
    said = rf"Checkpoint\({name}={value!r}\): expected an integer of at least {least}"
    with pytest.raises(scaler.InvalidArgument, match=said):
        loops.Checkpoint(tmp_path / "never", **{"every": 1, name: value})
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("resume", "how", "background"), [(True, "", False), (False, r"with Checkpoint\(resume=True\) ", True)]
)
def test_ctrl_c_says_where_the_run_is_saved(tmp_path, resume, how, background):
    def interrupt(visit):
        if visit.counters.data == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        Counting(tmp_path, actions=[interrupt], resume=resume, background=background).go(9)
    (note,) = caught.value.__notes__
    place = re.escape(str(tmp_path))
    assert re.fullmatch(f"halfstep: step 3 is saved in {place}: {how}the same program goes on from there.", note)
    assert Counting(tmp_path, resume=True).go(4).visits == 4


def test_it_is_called_by_a_loop_only(tmp_path):
    with pytest.raises(RuntimeError, match="begin"):
        loops.Checkpoint(tmp_path, every=1)(None)


def wider():
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(9), keras.layers.Dense(1)])


OTHERS = {
    "model": (lambda: {"model": wider}, r"variable 0 of its model was .*\[4, 1\] and is .*\[4, 9\]"),
    "precision": (
        lambda: {"model": lambda: plain_model("float16")},
        "variable 0 of its model was .*float32.* and is .*float16",
    ),
    "optimizer": (lambda: {"optimizer": keras.optimizers.Adam()}, "optimizer.class was 'SGD' and is 'Adam'"),
    "settings": (
        lambda: {"accumulate": 2, "clip": scaler.ClipByValue(0.5), "size": 4, "run": {"seed": 2}},
        r"batches was .*\(8, 4\).* and is .*\(4, 4\).*; accumulate was 1 and is 2; run.seed was 1 and is 2; "
        r"clip was None and is 'ClipByValue\(value=0.5\)'",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("saved")
    training(place, run={"seed": 1}).run(2)
    return place


@pytest.mark.exhaustive_with("model", "precision")
@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(saved, other):
    changes, named = OTHERS[other]
    before = {path.name: path.stat().st_mtime_ns for path in saved.iterdir()}
    loop = training(saved, resume=True, **{"run": {"seed": 1}, **changes()})
    weights = [value.copy() for value in loop.train_step.model.get_weights()]
    with pytest.raises(loops.CheckpointError, match=named) as caught:
        loop.run(4)
    assert "another folder" in str(caught.value)
    assert loop.counters == loops.Counters()
    np.testing.assert_equal(loop.train_step.model.get_weights(), weights)
    assert {path.name: path.stat().st_mtime_ns for path in saved.iterdir()} == before


def test_a_checkpoint_of_other_replicas_or_workers_is_refused(saved, monkeypatch):
    loop = training(saved, resume=True, run={"seed": 1})
    for name, named in (("replicas", "replicas was 2 and is 1"), ("workers", "workers was 2 and is None")):
        facts = folder.read_facts(folder.prefix(saved, 2))
        facts["identity"][name] = 2
        monkeypatch.setattr(folder, "newest_whole", lambda *_, facts=facts: (2, facts, {}))
        with pytest.raises(loops.CheckpointError, match=named):
            loop.run(4)


KINDS = {
    "an hs.TrainStep": {"strategy": "s", "optimizer": "o", "accumulate": 1, "clip_norm": None},
    "a step of your own": {},
    "an hs.ComposedStep of 'a', 'b'": {"accumulate": 1, "parts": {"b": {"every": 1}, "a": {"every": 2}}},
    "an hs.ComposedStep of 'c'": {"accumulate": 1, "parts": {"c": {"every": 1}}},
}


@pytest.mark.parametrize("here", KINDS)
@pytest.mark.parametrize("saved_by", KINDS)
def test_a_checkpoint_of_another_kind_of_step_is_refused_in_one_sentence(saved_by, here):
    common = {"replicas": 1, "batches": "b", "run": {"seed": 1}}
    there, now = ({**common, **KINDS[name]} for name in (saved_by, here))
    if here == saved_by:
        check_identity("run/ckpt-4", there, dict(reversed(now.items())))
        return
    with pytest.raises(loops.CheckpointError) as caught:
        check_identity("run/ckpt-4", there, now)
    text = f"run/ckpt-4 belongs to another run: it holds the variables of {saved_by}, and this run has {here}, which "
    assert str(caught.value).startswith(text)
    assert "None" not in str(caught.value)
    with pytest.raises(loops.CheckpointError, match=r"Besides, run.seed was 1 and is 2\. Resume with"):
        check_identity("run/ckpt-4", there, {**now, "run": {"seed": 2}})


def test_a_checkpoint_that_is_not_ours_is_named(tmp_path):
    tf.train.Checkpoint(weight=tf.Variable(1.0)).write(str(tmp_path / "ckpt-3"))
    with pytest.raises(loops.CheckpointError, match=r"step 3: .*facts"):
        Counting(tmp_path, resume=True).go(4)


NO_STATES = "the states of random generators in it are not those of a run"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FORMAT", 4, "its format is 4, and this version reads 3"),
        ("generators", dict, NO_STATES),
        (
            "generators",
            lambda: {"tf_generator": None, "keras_generator": None, "op_seeds": None, "python": 7},
            NO_STATES,
        ),
    ],
)
def test_a_checkpoint_of_another_form_is_one_sentence(tmp_path, monkeypatch, name, value, said):
    monkeypatch.setattr(f"loops.loop.state.state.{name}", value)
    Counting(tmp_path).go(2)
    with pytest.raises(loops.CheckpointError, match=said):
        Counting(tmp_path, resume=True).go(4)


def test_facts_are_json_that_others_can_read(saved):
    reader = tf.train.load_checkpoint(str(saved / "ckpt-2"))
    facts = json.loads(reader.get_tensor("facts/.ATTRIBUTES/py_state"))
    assert facts["counters"] == {"data": 2, "attempted": 2, "applied": 2, "skipped": 0}
    assert facts["loss_scaler"]["loss_scale"] == 8.0


@pytest.mark.usefixtures("in_a_graph")
def test_a_dataset_that_cannot_be_iterated_is_not_blamed_on_the_folder(tmp_path):
    # Without a cycle_length it is the number of cores, when the iterator is made.
    data = tf.data.Dataset.range(4).interleave(lambda number: tf.data.Dataset.range(number), num_parallel_calls=10_000)
    loop = loops.Loop(lambda x: {"loss": x}, data, actions=[loops.Checkpoint(tmp_path / "saved", every=2)])
    with pytest.raises((tf.errors.InvalidArgumentError, loops.LoopError), match="cycle_length") as raised:
        loop.run(2)
    assert "folder" not in str(raised.value)


@pytest.mark.usefixtures("in_a_graph")
def test_a_position_that_does_not_fit_the_dataset_is_not_blamed_on_the_folder(tmp_path):
    def run(cycle_length, steps):
        data = tf.data.Dataset.range(4).interleave(
            lambda number: tf.data.Dataset.range(5), cycle_length=cycle_length, block_length=1, num_parallel_calls=1
        )
        saved = loops.Checkpoint(tmp_path / "saved", every=2, resume=True)
        loops.Loop(lambda x: {"loss": tf.cast(x, tf.float32)}, data, actions=[saved]).run(steps)

    run(2, 4)
    with (
        pytest.warns(loops.ResumeWarning, match="cycle_length was 2 and is 4"),
        pytest.raises(loops.CheckpointError, match=r"does not fit this dataset \(The iterator cycle length 4 is"),
    ):
        run(4, 6)
