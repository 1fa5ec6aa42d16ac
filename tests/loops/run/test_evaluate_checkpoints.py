"""Guards the evaluation of a run's checkpoints beside its training: the bits of the run, each once, after any stop."""

import json
import shutil
import warnings

import keras
import pytest
import tensorflow as tf
from loop_cases import batch
from models import one_layer, plain_model, squared_error, stateful_model
from processes import start, wait_for

import loops
import scaler
from loops.loop.state import folder
from loops.record.reading import read_run
from loops.run import evaluate_checkpoints as beside

EVERY, STEPS = 2, 8


def held_out():
    return tf.data.Dataset.from_tensor_slices(batch(99, 16)).batch(8)


def validation(model, every=EVERY):
    return loops.Evaluate(model, held_out(), [keras.metrics.MeanSquaredError(name="error")], every=every)


def make_run(place, *, model=stateful_model, averaged=False, actions=lambda model: [], keep=20, data=None):
    """A run of a float16 model with masters; its loop and what predicts."""
    net = model("float16")
    optimizer = keras.optimizers.SGD(0.05, use_ema=averaged, ema_momentum=0.5 if averaged else None)
    step = loops.TrainStep(net, squared_error, optimizer, loss_scaler=scaler.LossScaler(scaler.Dynamic(8.0)))
    predicts = loops.Averaged(net, optimizer) if averaged else net
    checkpoint = loops.Checkpoint(place / "checkpoints", every=EVERY, keep=keep, resume=True)
    data = data or tf.data.Dataset.from_tensor_slices(batch(1, 64)).repeat().batch(8)
    # XLA could not compile it, as it draws random numbers: the loop need not trace it to find out.
    loop = loops.Loop(step, data, steps_per_call=1, actions=[*actions(predicts), checkpoint], jit_compile=False)
    return loop, predicts


def train(place, steps=STEPS, **arguments):
    """Trains, and returns what an undisturbed evaluation in the run measured."""
    found = {}

    def actions(predicts):
        evaluate = validation(predicts)
        return [evaluate, lambda visit: found.update({evaluate.step: evaluate.results} if evaluate.step else {})]

    make_run(place, actions=actions, **arguments)[0].run(steps)
    return found


def own_step(place, *, actions=(), keep=9, first=1):
    """A run of a step of one's own that sums numbers, and its sum."""
    total = tf.Variable(0.0)

    def step(number):
        total.assign_add(tf.cast(number, tf.float32))
        return {"loss": total + 0.0}

    checkpoint = loops.Checkpoint(place, every=EVERY, keep=keep, resume=True)
    numbers = tf.data.Dataset.range(first, 100)
    return loops.Loop(step, numbers, steps_per_call=1, actions=[*actions, checkpoint]), total


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder, and what was measured in it. No test writes there."""
    place = tmp_path_factory.mktemp("run")
    return place, train(place)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run's folder."""
    return shutil.copytree(trained[0] / "checkpoints", tmp_path / "checkpoints").parent


@pytest.fixture(scope="module")
def net():
    return stateful_model("float16")


def test_a_model_is_evaluated_as_the_run_would_to_the_bit(trained, run, net):
    before = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    found = loops.evaluate_checkpoints(run, validation(net).measure, net, follow=False)
    assert found == trained[1]
    assert sorted(found) == [2, 4, 6, 8]
    assert len({one["error"] for one in found.values()}) == 4
    assert {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()} == before
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "evaluations.jsonl"]


@pytest.mark.slow
def test_the_average_of_a_run_needs_its_loop(tmp_path):
    expected = train(tmp_path, 4, averaged=True)
    loop, predicts = make_run(tmp_path / "elsewhere", averaged=True)
    found = loops.evaluate_checkpoints(tmp_path, validation(predicts).measure, loop, follow=False)
    assert found == expected
    masters = [one.numpy() for one in loop.train_step.masters.weights]
    assert [one.dtype for one in masters] == ["float32"] * 3
    # Both are restored: the weights are the masters, rounded.
    for weight, master in zip(loop.train_step.model.trainable_variables, masters, strict=True):
        assert (weight.numpy() == master.astype("float16")).all()


def test_a_step_of_ones_own_needs_its_loop(tmp_path, net):
    own_step(tmp_path)[0].run(6)
    loop, total = own_step(tmp_path / "elsewhere")
    found = loops.evaluate_checkpoints(tmp_path, lambda step: {"total": total}, loop, follow=False)
    assert found == {2: {"total": 3.0}, 4: {"total": 10.0}, 6: {"total": 21.0}}
    assert loop.counters.data == 0
    (tmp_path / "evaluations.jsonl").unlink()
    with pytest.raises(loops.CheckpointError, match=r"it does not say which of its variables are the model's"):
        loops.evaluate_checkpoints(tmp_path, lambda step: {"total": 1.0}, net, follow=False)


class Stopped(Exception):
    """In place of a kill."""


def test_each_checkpoint_is_evaluated_once_in_order_also_after_a_stop(trained, run, net):
    seen, measure = [], validation(net).measure

    def stops_at_six(step):
        seen.append(step)
        if seen == [2, 4, 6]:
            raise Stopped
        return measure(step)

    with pytest.raises(Stopped):
        loops.evaluate_checkpoints(run, stops_at_six, net, follow=False)
    with (run / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 6, "checkp')  # A kill tore it.
    assert loops.evaluate_checkpoints(run, stops_at_six, net, follow=False) == trained[1]
    assert seen == [2, 4, 6, 6, 8]
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert loops.evaluate_checkpoints(run / "checkpoints", stops_at_six, net, follow=False) == trained[1]
    assert len(seen) == 5


@pytest.mark.usefixtures("eagerly")
def test_a_step_that_was_trained_again_is_evaluated_again(tmp_path):
    seen = []

    def evaluate(step):
        seen.append(step)
        return {"total": total}

    own_step(tmp_path / "run")[0].run(6)
    own_step(tmp_path / "other", first=2)[0].run(4)
    loop, total = own_step(tmp_path / "elsewhere")
    loops.evaluate_checkpoints(tmp_path / "run", evaluate, loop, follow=False)
    for path in (tmp_path / "other").glob("ckpt-4.*"):
        (tmp_path / "run" / path.name).write_bytes(path.read_bytes())
    found = loops.evaluate_checkpoints(tmp_path / "run", evaluate, loop, follow=False)
    assert seen == [2, 4, 6, 4]
    assert found == {2: {"total": 3.0}, 4: {"total": 14.0}, 6: {"total": 21.0}}


def remove(run, step):
    for path in (run / "checkpoints").glob(f"ckpt-{step}.*"):
        path.unlink()


def test_a_checkpoint_that_is_removed_meanwhile_is_skipped_with_a_sentence(run, net):
    def removes_the_next(step):
        remove(run, step + 2)
        return {"a": step}

    with pytest.warns(UserWarning, match=r"ckpt-\d was removed before it was evaluated: step \d is skipped\.") as told:
        found = loops.evaluate_checkpoints(run, removes_the_next, net, follow=False)
    assert found == {2: {"a": 2.0}, 6: {"a": 6.0}}
    assert len(told) == 2


def test_a_damaged_checkpoint_is_skipped_with_a_sentence_once(run, net, monkeypatch):
    for part, size in (("data-00000-of-00001", 100), ("index", 50)):
        path = run / "checkpoints" / f"ckpt-{4 if part == 'index' else 6}.{part}"
        path.write_bytes(path.read_bytes()[:size])
    monkeypatch.setattr(beside.time, "sleep", lambda seconds: None)
    with pytest.warns(UserWarning, match=r"is damaged \(.+\): step \d is skipped") as told:
        found = loops.evaluate_checkpoints(run, lambda step: {"a": step}, net)
    assert sorted(found) == [2, 8]
    assert len(told) == 2


@pytest.mark.usefixtures("eagerly")
def test_it_follows_a_run_until_that_is_complete(tmp_path, monkeypatch):
    """The run begins later, pauses at a goal, is held by another process, and is ended by an action."""
    stages, waits = iter([2, 4, "lock", None, None, "unlock", 20]), []
    lock = tmp_path / "checkpoints" / ".lock"
    stop = loops.StopWhen(lambda visit: visit.counters.data == 6)
    training, _ = own_step(tmp_path / "checkpoints", keep=2, actions=[stop])

    def sleep(seconds):
        waits.append(next(stages, "after"))
        if isinstance(waits[-1], int):
            training.run(waits[-1])
        elif waits[-1] in ("lock", "unlock"):
            lock.touch() if waits[-1] == "lock" else lock.unlink()

    monkeypatch.setattr(beside.time, "sleep", sleep)
    loop, total = own_step(tmp_path / "elsewhere")
    found = loops.evaluate_checkpoints(tmp_path, lambda step: {"total": total}, loop)
    assert found == {2: {"total": 3.0}, 4: {"total": 10.0}, 6: {"total": 21.0}}
    assert waits == [2, 4, "lock", None, None, "unlock", 20, "after"]


def test_a_run_that_was_stopped_is_not_complete(tmp_path):
    def complete():
        return folder.newest_facts(tmp_path)[1]["complete"]

    def fails(visit):
        if visit.counters.data in (3, 6):
            raise Stopped

    loop, _ = own_step(tmp_path, actions=[fails])
    with pytest.raises(Stopped):
        loop.run(9)
    assert not complete()
    loop.run(5)
    assert complete()
    with pytest.raises(Stopped):
        loop.run(9)
    assert not complete()


def test_a_second_evaluator_is_refused(run, net):
    def again(step):
        with pytest.raises(loops.NotWritable, match=r"^evaluate_checkpoints\(.*another run writes it"):
            loops.evaluate_checkpoints(run, again, net, follow=False)
        return {"a": 1.0}

    loops.evaluate_checkpoints(run, again, net, follow=False)


def test_errors_of_the_users_function_are_its_own(run, net):
    def reads(step):
        raise FileNotFoundError("my data")

    with pytest.raises(FileNotFoundError, match=r"^my data$"):
        loops.evaluate_checkpoints(run, reads, net, follow=False)


@pytest.mark.parametrize("found", [None, 0.5, {}, {"a": "0.5"}, {"a": [1.0, 2.0]}, {1: 2.0}, {"step": 1}, {"a": None}])
def test_an_evaluation_without_numbers_is_refused(run, net, found):
    with pytest.raises(scaler.InvalidArgument, match=r"at step 2 it returned .+: expected a dict of numbers by name"):
        loops.evaluate_checkpoints(run, lambda step: found, net, follow=False)


def test_a_number_may_be_nan_or_of_any_kind(run, net):
    values = {"nan": float("nan"), "tensor": tf.constant(0.5, tf.bfloat16), "count": 3}
    loops.evaluate_checkpoints(run, lambda step: values, net, follow=False)
    row = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert (row["nan"], row["tensor"], row["count"]) == (None, 0.5, 3.0)


@pytest.mark.parametrize("model", [plain_model, one_layer, lambda kind: stateful_model()])
def test_a_model_that_does_not_fit_is_refused_and_not_touched(run, model):
    other = model("float16")
    before = [one.numpy().tobytes() for one in other.variables]
    with pytest.raises(loops.CheckpointError, match=r"ckpt-2 was saved with another model, .*its model "):
        loops.evaluate_checkpoints(run, lambda step: {"a": 1.0}, other, follow=False)
    assert [one.numpy().tobytes() for one in other.variables] == before


def test_what_cannot_work_is_refused(run, net, tmp_path_factory):
    def refused(error, match, *arguments, follow=True):
        with pytest.raises(error, match=match):
            loops.evaluate_checkpoints(*arguments, follow=follow)

    def evaluate(step):
        return {"a": 1.0}

    refused(scaler.InvalidArgument, "no such folder: expected a run's --out", run / "none", evaluate, net)
    refused(scaler.InvalidArgument, r"evaluate={}\): expected a function of the step", run, {}, net)
    refused(scaler.InvalidArgument, r"restore=None\): expected the run's model, or an hs\.Loop", run, evaluate, None)
    empty = tmp_path_factory.mktemp("empty")
    refused(loops.CheckpointError, "no checkpoint. Name the folder", empty, evaluate, net, follow=False)
    (empty / "notes.txt").touch()
    refused(loops.CheckpointError, "no checkpoint. Name the folder", empty, evaluate, net)
    assert [path.name for path in empty.iterdir()] == ["notes.txt"]


def test_a_report_shows_each_metric_beside_the_training(run, net):
    (run / "own.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in range(1, 9)))
    (run / "evaluations.jsonl").write_text(
        '{"step": 4, "checkpoint": "x", "error": 0.25}\n{"step": 4, "checkpoint": "x", "error": 0.5}\ntorn'
    )
    measure = validation(net).measure
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loops.evaluate_checkpoints(run, lambda step: {**measure(step), "<b>": step}, net, follow=False)
    found = read_run(run)
    assert found.evaluations.step.tolist() == [2, 4, 6, 8]
    assert found.evaluations.names == ("error", "<b>")
    assert len(found) == 8  # The log is another file, which is found beside it.
    loops.observe.report([run], run / "report.html")
    text = (run / "report.html").read_text()
    assert "Evaluation: error" in text
    assert "Evaluation: &lt;b&gt;" in text
    assert "<b>" not in text.split("Evaluation: error")[1].split("Evaluation: &lt;")[0].replace("<b></b>", "")


def evaluate_beside(place, lingers_at=0):
    net = stateful_model("float16")
    measure = validation(net).measure

    def evaluate(step):
        if step == lingers_at:
            (place / "lingers").touch()
            wait_for(lambda: False)
        return measure(step)

    loops.evaluate_checkpoints(place, evaluate, net)


@pytest.mark.slow
def test_a_process_beside_the_training_is_killed_in_the_middle(trained, tmp_path):
    """The training goes on once it has started, so that both are at work, and another evaluation ends it."""

    def waits(visit):
        assert wait_for((tmp_path / "evaluations.jsonl").exists, process=first)

    first = start(evaluate_beside, tmp_path, 4)
    make_run(tmp_path, actions=lambda model: [waits])[0].run(STEPS)
    assert wait_for((tmp_path / "lingers").exists, process=first)
    first.kill()
    first.join()
    evaluate_beside(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert {row["step"]: {"error": row["error"]} for row in rows} == trained[1]
    assert len(rows) == len(trained[1])
    # The training has the bits of one that nobody watched.
    ends = [tf.train.load_checkpoint(folder.prefix(place / "checkpoints", STEPS)) for place in (tmp_path, trained[0])]
    names = [name for name in ends[0].get_variable_to_shape_map() if name.startswith(("model/", "optimizer/"))]
    assert len(names) > 5
    assert all(ends[0].get_tensor(name).tobytes() == ends[1].get_tensor(name).tobytes() for name in names)
