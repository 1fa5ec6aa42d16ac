"""Guards that any past step can be had again, bit for bit, and that whatever stands in the way is told."""

import json
import shutil
import signal

import keras
import numpy as np
import pytest
import rewind_cases
import tensorflow as tf
from resume_cases import batches
from rewind_cases import BAD, counting, listing, plain, stateful, taken
from rigs import raw

import loops
import scaler
from loops.loop.state.resources import StepResources
from loops.run.rewind import batches as kept
from loops.run.rewind import read_log, rewind
from loops.run.rewind.replay_point import Snapshot

pytestmark = pytest.mark.slow

STEPS = 13


def went(place, build, steps=STEPS, **arguments):
    """The folder of a run that took so many steps."""
    place.mkdir(exist_ok=True)
    build(place, **arguments).run(steps)
    return place


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return went(tmp_path_factory.mktemp("stateful"), stateful)


@pytest.fixture(scope="module")
def from_the_start(run):
    return rewind(stateful(run), BAD)


@pytest.fixture
def from_a_checkpoint(from_the_start):
    """Of the same loop: a moment's own copies are not in its way."""
    return rewind(from_the_start.loop, STEPS - 1)


@pytest.fixture(scope="module")
def counted_once(tmp_path_factory):
    keras.utils.set_random_seed(0)  # As before each test, which this comes before.
    return went(tmp_path_factory.mktemp("counted"), counting)


@pytest.fixture
def counted(tmp_path, counted_once):
    return shutil.copytree(counted_once, tmp_path / "counted")


def variables(moment):
    return [one for group in moment.loop.state({}, actions=()).groups.values() for one in group]


def bits(outputs):
    return {name: value.tobytes() for name, value in outputs.items()}


def losses(rows):
    return {row["step"]: row["loss"] for row in rows}


# ---------------------------------------------------------------------------------------------- the step itself


@pytest.mark.exhaustive_with("from_the_start")
@pytest.mark.parametrize("moment", ["from_the_start", "from_a_checkpoint"])
def test_a_step_is_had_as_it_was(request, run, moment):
    moment = request.getfixturevalue(moment)
    moment.reset()
    assert (moment.reproduced, moment.differs) == (True, None)
    assert moment.began_at == (8 if moment.step > 8 else 0)
    assert moment.rows == read_log(run / "steps.jsonl")
    assert moment.logged == moment.rows[moment.step - 1]
    data = taken(batches(BAD), STEPS)
    assert plain(moment.batch) == data[moment.step]
    assert plain(moment.next_batch) == data[moment.step + 1]
    assert [plain(one) for one in moment.before] == [data[step] for step in range(moment.step - 3, moment.step)]
    outputs = moment.outputs()
    assert bool(outputs["applied"]) == (moment.step != BAD) == moment.logged["applied"]
    assert float(outputs["loss_scale"]) == moment.logged["loss_scale"]
    assert outputs["loss"].tolist() == moment.logged["loss"] or not np.isfinite(outputs["loss"])


def test_reset_is_exact_after_anything(from_the_start):
    moment = from_the_start
    moment.reset()
    before, generators = raw(variables(moment)), tf.random.get_global_generator().state.numpy().tobytes()
    first = bits(moment.outputs())
    assert raw(variables(moment)) == before
    traced = tf.function(lambda batch: moment.take(batch))
    for batch in (moment.batch, moment.next_batch, *moment.before):
        traced(batch)
    for variable in variables(moment):
        variable.assign(tf.ones_like(variable))
    tf.random.get_global_generator().normal([3])
    assert raw(variables(moment)) != before
    moment.reset()
    assert raw(variables(moment)) == before
    assert tf.random.get_global_generator().state.numpy().tobytes() == generators
    assert bits(moment.outputs()) == first


def test_operations_without_a_generator_draw_the_same_each_time(tmp_path):
    """Not what the run drew, of which there is no trace; and that is told."""
    tf.random.set_seed(0)

    def build(run):
        total = tf.Variable(0.0)

        def step(number):
            total.assign_add(tf.random.uniform([]) + 0.0 * tf.cast(number, tf.float32))
            return {"loss": tf.identity(total)}

        actions = [loops.JsonLines(run / "steps.jsonl"), loops.Checkpoint(run / "ckpt", every=4)]
        return loops.Loop(step, rewind_cases.numbers(), actions=actions)

    with pytest.warns(loops.ResumeWarning, match="RandomUniform"):
        went(tmp_path / "a", build, steps=7)
    moment = rewind(build(tmp_path / "a"), 7)
    assert "draws random numbers with RandomUniform" in moment.differs
    drawn = [bits(moment.outputs()) for _ in range(3)]
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, tf.bfloat16.as_numpy_dtype])
def test_a_snapshot_keeps_every_bit(dtype):
    """NaN's payloads, subnormal numbers and the sign of zero too."""
    size = np.dtype(dtype).itemsize
    every = np.arange(2**16, dtype=np.uint16) if size == 2 else np.arange(0, 2**32, 65_521, dtype=np.uint32)
    variable = tf.Variable(every.view(dtype))
    saved = Snapshot([variable], StepResources([], [], []))
    variable.assign(tf.zeros_like(variable))
    saved.restore()
    assert variable.numpy().tobytes() == every.tobytes()


def test_nothing_in_the_folder_changes(counted):
    (counted / "ckpt" / "ckpt-99.data-00000-of-00001").write_bytes(b"left behind by a kill")
    before = listing(counted)
    moment = rewind(counting(counted), 10)
    moment.from_checkpoint(lambda loop: None)
    assert moment.reproduced
    assert moment.began_at == 8
    assert listing(counted) == before


@pytest.mark.exhaustive
def test_a_window_is_had_in_its_middle(tmp_path):
    place = went(tmp_path / "window", stateful, accumulate=2, steps_per_call=2, steps=6)
    moment = rewind(stateful(place, accumulate=2, steps_per_call=1), 6)
    assert (moment.differs, moment.began_at) == (None, 4)
    assert moment.outputs()["attempted"]


# ---------------------------------------------------------------------------------------------- from earlier on


def test_the_steps_again_are_the_runs_if_nothing_changes_and_all_is_put_back_when_a_change_fails(counted):
    moment = rewind(counting(counted, steps_per_call=3), 11)
    outputs = moment.from_checkpoint(lambda loop: None)
    assert [float(one["loss"]) for one in outputs] == [losses(moment.rows)[step] for step in (9, 10, 11)]
    for steps_back in (-1, 3, 1.0):
        with pytest.raises(scaler.InvalidArgument, match="was reached from step 8: expected an integer from 0 to 2"):
            moment.from_checkpoint(lambda loop: None, steps_back)
    before = raw(variables(moment))

    def fail(loop):
        loop.calls.one(moment.batch)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        moment.from_checkpoint(fail)
    assert raw(variables(moment)) == before


# ---------------------------------------------------------------------------------------------- checkpoints


def test_a_damaged_checkpoint_is_passed_over(counted):
    (data,) = (counted / "ckpt").glob("ckpt-8.data*")
    data.write_bytes(data.read_bytes()[:-5] + b"xxxxx")
    before = listing(counted)
    with pytest.warns(loops.ResumeWarning, match="step 8 is damaged .* from step 4 on"):
        moment = rewind(counting(counted), 10)
    assert (moment.began_at, moment.differs) == (4, None)
    assert listing(counted) == before


def test_without_a_checkpoint_before_it_the_run_begins_anew(counted):
    for path in (counted / "ckpt").iterdir():
        path.unlink()
    moment = rewind(counting(counted), 10)
    assert (moment.began_at, moment.differs, len(moment.before)) == (0, None, 3)


def test_a_used_loop_cannot_begin_anew_but_goes_back(counted):
    loop = counting(counted)
    assert rewind(loop, 11).reproduced
    assert rewind(loop, 6).reproduced
    with pytest.raises(
        loops.LoopError, match="no whole checkpoint before step 2, and this loop has already taken 5 steps"
    ):
        rewind(loop, 2)


def test_checkpoints_of_another_run_or_of_other_variables_are_refused(counted):
    for step in (2, 10):
        with pytest.raises(loops.CheckpointError, match=r"another run: run.name was 'counting' and is 'other'"):
            rewind(counting(counted, name="other"), step)

    class More:
        def __init__(self):
            self.total, self.more = tf.Variable(0.0), tf.Variable([0.0, 0.0])

        def __call__(self, number):
            self.total.assign_add(tf.cast(number, tf.float32))
            self.more.assign_add([1.0, 1.0])
            return {"loss": tf.identity(self.total)}

    actions = [loops.Checkpoint(counted / "ckpt", every=4, run={"name": "counting"})]
    with pytest.raises(loops.CheckpointError, match="another model, optimizer, strategy or train step"):
        rewind(loops.Loop(More(), rewind_cases.numbers(), actions=actions), 10)


# ---------------------------------------------------------------------------------------------- the log


def changed(place, step, **values):
    rows = read_log(place / "steps.jsonl")
    rows[step - 1].update(values)
    (place / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_the_first_difference_is_told_with_both_values(counted):
    true = losses(read_log(counted / "steps.jsonl"))
    changed(counted, 10, loss=true[10] + 1)
    moment = rewind(counting(counted), 12)
    assert not moment.reproduced
    said = f"Loss of step 10 was {true[10] + 1} in the run's log, but is {true[10]} here. The same bits need"
    assert moment.differs.startswith(said)
    assert float(moment.outputs()["loss"]) == moment.logged["loss"]
    # The step itself is compared, too.
    changed(counted, 9, loss=None)
    assert "Loss of step 9 was not finite" in rewind(moment.loop, 9).differs


def test_actions_that_change_the_training_are_seen(tmp_path):
    """They do not act in a replay."""

    def reset(visit):
        if visit.counters.data == 10:
            loop.calls.train_step.__closure__[0].cell_contents.assign(0.0)

    (tmp_path / "a").mkdir()
    loop = counting(tmp_path / "a", steps_per_call=1, actions=[reset])
    loop.run(11)
    assert "of step 11 was" in rewind(counting(tmp_path / "a"), 11).differs


@pytest.mark.exhaustive_with("file", "in the middle", "of other columns", "torn")
@pytest.mark.parametrize("lost", ["file", "torn", "of other steps", "of other columns", "in the middle"])
def test_a_log_that_lacks_something(counted, lost):
    path = counted / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if lost == "file":
        path.unlink()
    elif lost == "torn":
        path.write_bytes("".join(lines[:9]).encode() + b'{"step": 10, "lo\xff')
    elif lost == "of other steps":
        path.write_text("".join(lines[:3]))
    elif lost == "of other columns":
        path.write_text('{"step": 9, "error": 3}\n')
    else:
        path.write_text("".join(["[1]\n", '{"step": true}\n', "7\n", *lines[:4], "\n", '{"st\n', *lines[8:]]))
    moment = rewind(counting(counted), 10)
    because = {
        "file": "There is no log of the run to compare with",
        "of other steps": "The run's log does not have the steps 9 to",
        "of other columns": "The run's log does not have the steps 9 to",
    }
    assert moment.reproduced == (lost in ("torn", "in the middle"))
    assert moment.reproduced or moment.differs.startswith(because[lost])
    assert (moment.logged is not None) == (lost == "in the middle")
    assert plain(moment.batch) == taken(rewind_cases.numbers(), 10)[10]


def test_the_log_may_lie_in_the_runs_folder(counted):
    assert rewind(counting(counted, log=False), 10).logged is None
    assert rewind(counting(counted, log=False), 10, run=counted).reproduced


# ---------------------------------------------------------------------------------------------- data


def generated():
    return tf.data.Dataset.from_generator(lambda: iter(range(1, 41)), output_signature=tf.TensorSpec([], tf.int64))


@pytest.mark.filterwarnings("ignore:.*cannot be saved:loops.ResumeWarning")
def test_a_dataset_whose_position_cannot_be_saved(tmp_path, monkeypatch):
    place = went(tmp_path / "a", counting, dataset=generated(), steps_per_call=2)
    for step, began_at in ((3, 0), (11, 8)):
        moment = rewind(counting(place, generated(), steps_per_call=2), step)
        assert (moment.differs, moment.began_at) == (None, began_at)
        assert (plain(moment.batch), plain(moment.next_batch)) == ([step], [step + 1])
        assert [plain(one) for one in moment.before] == [[step - 2], [step - 1]]
        for _ in range(2):
            again = [float(one["loss"]) for one in moment.from_checkpoint(lambda loop: None)]
            assert again == [losses(moment.rows)[number] for number in range(began_at + 1, step + 1)]
    monkeypatch.setattr(kept, "_MOST_BYTES", 12)
    moment = rewind(counting(place, generated()), 11)
    assert (moment.differs, plain(moment.batch), moment.before) == (None, [11], [])
    with pytest.raises(loops.LoopError, match=r"the dataset cannot go back: .* Save checkpoints more often"):
        moment.from_checkpoint(lambda loop: None)
    assert moment.outputs()["loss"] == moment.logged["loss"]


def test_data_that_end_with_the_step_or_before_it(tmp_path):
    place = went(tmp_path / "a", counting, dataset=tf.data.Dataset.range(5), steps=5)
    assert rewind(counting(place, tf.data.Dataset.range(5)), 5).next_batch is None
    shutil.rmtree(place / "ckpt")
    with pytest.raises(loops.LoopError, match=r"dataset ended after 4 (batches|steps)"):
        rewind(counting(place, tf.data.Dataset.range(4)), 5)


def test_no_room_for_positions(counted, monkeypatch):
    monkeypatch.setattr(kept.tempfile, "tempdir", str(counted / "absent"))
    with pytest.raises(loops.LoopError, match=r"could not be written there .* set TMPDIR to another folder"):
        rewind(counting(counted), 10)


# ---------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_be_rewound_is_refused(counted, monkeypatch):
    loop = counting(counted)
    for step, says in (
        (0, "step 0: expected an integer of at least 1"),
        (2.0, "step 2.0: expected"),
        (14, "log and checkpoints end at step 13: expected a step from 1 to 13"),
    ):
        with pytest.raises(scaler.InvalidArgument, match=says):
            rewind(loop, step)
    with pytest.raises(scaler.InvalidArgument, match=r"expected an hs\.Loop"):
        rewind(counted, 3)
    with pytest.raises(scaler.InvalidArgument, match=r"no hs\.Checkpoint among its actions"):
        rewind(counting(counted, saves=False), 3)
    monkeypatch.setattr(loop.workers, "count", 2)
    with pytest.raises(loops.LoopError, match=r"on 2 workers, .* in one process"):
        rewind(loop, 1)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_end_it_after_the_call(counted, number, error):
    told = []

    def progress(done, of):
        told.append((done, of))
        if done == 2:
            signal.raise_signal(number)

    with pytest.raises(error):
        rewind(counting(counted, every=100, steps_per_call=1), 3, progress=progress)
    assert told == [(1, 2), (2, 2)]
