"""Guards evaluation and what follows it: early stop, best checkpoints, and their state in a run that goes on."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from halfstep.commands.read_runs import text_of_checkpoint
from loops.loop.state import folder
from loops.loop.state.folder import describe
from loops.record.reading import read_run


def held_out(values=(1.0, 3.0)):
    values = tf.constant(values)
    return tf.data.Dataset.from_tensor_slices((values, tf.zeros_like(values))).batch(1)


class Run:
    """A model that says `weight`, which each step sets to the next of `values`; its loss on held-out data is that."""

    def __init__(self, values, checkpoint=None, patience=2, every=1, save=100, **arguments):
        weight = tf.Variable(0.0)

        def step(value):
            weight.assign(value)
            return {"loss": weight + 0.0}

        self.measured = []
        self.evaluate = loops.Evaluate(
            lambda x, training: tf.cast(weight + 0.0 * x, tf.float16), held_out(), [Value(name="value")], every=every
        )
        self.best = loops.Best(self.evaluate, "value", "min")
        self.early = loops.EarlyStop(self.best, patience=patience)
        actions = [self.evaluate, self.early, lambda visit: self.measured.append(dict(self.evaluate.results))]
        if checkpoint:
            actions.append(loops.Checkpoint(checkpoint, every=save, best=self.best, **arguments))
        data = tf.data.Dataset.from_tensor_slices(np.float32(values))
        self.loop = loops.Loop(step, data, steps_per_call=1, actions=actions)


class Value(keras.metrics.Mean):
    """The mean prediction."""

    def update_state(self, y, prediction, sample_weight=None):
        assert prediction.dtype == "float32"
        super().update_state(prediction, sample_weight)


@pytest.mark.usefixtures("eagerly")
def test_metrics_are_those_of_the_whole_dataset_anew_each_time():
    run = Run([4.0, 2.0, 1.0, 8.0], every=2)
    run.loop.run(4)
    assert run.measured == [{}, {"value": 2.0}, {"value": 2.0}, {"value": 8.0}]
    assert run.evaluate.step == 4


def test_a_real_model_is_measured_with_weights_and_does_not_move():
    model = keras.Sequential([keras.Input([2]), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)])
    x, y = np.float32([[1, 2], [3, 4], [5, 6]]), np.zeros([3, 2], np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, y, np.float32([1, 1, 0]))).batch(2)
    evaluate = loops.Evaluate(model, data, [keras.metrics.MeanSquaredError(name="mse")], every=1)
    before = [variable.numpy() for variable in model.variables]
    expected = np.mean(np.square(x[:2])) / 1.001
    np.testing.assert_allclose(evaluate.measure()["mse"], expected, rtol=1e-4)
    np.testing.assert_equal([variable.numpy() for variable in model.variables], before)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_what_is_padding_does_not_count_in_16_bits_either(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input([3, 1]), keras.layers.Masking(), keras.layers.Dense(1, use_bias=False)])
    x = np.float32([[[1.0], [0.0], [2.0]], [[0.0], [0.0], [3.0]]])
    metric = keras.metrics.MeanSquaredError(name="mse", dtype="float32")
    data = tf.data.Dataset.from_tensors((x, np.ones_like(x)))
    weight = float(model.layers[-1].kernel[0, 0])
    expected = np.mean(np.square(weight * np.float32([1, 2, 3]) - 1))
    np.testing.assert_allclose(loops.Evaluate(model, data, [metric], every=1).measure()["mse"], expected, rtol=2e-3)


def test_a_metric_that_takes_something_else_is_one_sentence():
    x, zeros = keras.Input([1]), tf.zeros([2, 1])
    two = keras.Model(x, {"a": keras.layers.Dense(1)(x), "b": keras.layers.Dense(1)(x)})
    not_two = "The model has 2 outputs. Give a function that returns one"
    for model, y, metric, says in (
        (two, {"a": zeros, "b": zeros}, keras.metrics.MeanSquaredError, not_two),
        (keras.layers.Dense(1), zeros, keras.metrics.Mean, "a Mean, does not take .* Give a metric of predictions"),
    ):
        data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), y))
        with pytest.raises(scaler.InvalidArgument, match=says) as caught:
            loops.Evaluate(model, data, [metric(name="own")], every=1).measure()
        assert "Evaluate('validation'): the metric 'own'" in str(caught.value)


def test_an_empty_dataset_is_one_clear_error():
    evaluate = loops.Evaluate(lambda x, training: x, held_out().take(0), [Value()], every=1)
    data = tf.data.Dataset.from_tensor_slices([1.0, 2.0])
    loop = loops.Loop(lambda x: {"loss": x}, data, steps_per_call=1, actions=[evaluate])
    with pytest.raises(loops.LoopError, match=r"'validation'.*empty"):
        loop.run(2)
    assert loop.counters.data == 1


@pytest.mark.usefixtures("eagerly")
def test_the_run_ends_when_patience_does():
    run = Run([5.0, 3.0, 4.0, math.nan, 1.0])
    assert run.loop.run(5).data == 4
    assert run.loop.stopped == "no improvement in 2 evaluations: the best value, 3, is that of step 2"
    assert math.isnan(run.evaluate.results["value"])
    assert run.loop.run(5).data == 4


@pytest.mark.usefixtures("eagerly")
def test_only_nan_is_never_best():
    run = Run([math.nan, math.nan, 1.0])
    run.loop.run(3)
    assert run.best.value is None
    assert "never a number" in run.loop.stopped


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "step"),
    [
        ("max", 0.0, [3.0, 2.0, 1.0, 4.0], 4),
        ("min", 0.0, [3.0, 2.0, 1.0, 4.0], 3),
        ("min", 2.5, [3.0, 2.0, 1.0, 4.0], 1),
        ("min", 0.0, [math.nan, 7.0, 8.0, 9.0], 2),
    ],
)
def test_better_is_what_was_asked_for(mode, min_delta, values, step):
    evaluate = loops.Evaluate(lambda x, training: x, held_out(), [Value(name="value")], every=1)
    best = loops.Best(evaluate, "value", mode, min_delta=min_delta)
    for evaluate.step, value in enumerate(values, 1):
        evaluate.results = {"value": value}
        best.look()
        best.look()  # Two actions may share it.
    assert best.step == step
    assert best.since == 4 - step


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("accuracy", "max"),
        (keras.metrics.AUC(name="area"), "max"),  # Keras knows it.
        (keras.metrics.MeanSquaredError(name="m"), "min"),
        (Value(name="top_5_accuracy"), "max"),
        (Value(name="f1_score"), "max"),
        (Value(name="Loss"), "min"),
        (Value(name="accuracy_loss"), "min"),
        (Value(name="flacc"), None),
        (Value(name="accuracy_gap"), None),
    ],
)
def test_which_is_better_is_taken_from_the_metric_or_asked_for(metric, mode):
    evaluate = loops.Evaluate(lambda x, training: x, held_out(), [metric], every=1)
    (name,) = evaluate.metric_names
    if mode is None:
        with pytest.raises(scaler.InvalidArgument, match=rf"Best\(metric='{name}'\).+ mode='min' or mode='max'"):
            loops.Best(evaluate, name)
        return
    best = loops.Best(evaluate, name)
    for evaluate.step, value in enumerate([2.0, 3.0, 1.0], 1):
        evaluate.results = {name: value}
        best.look()
    assert best.value == (3.0 if mode == "max" else 1.0)


@pytest.mark.usefixtures("eagerly")
def test_a_run_that_goes_on_stops_where_the_whole_one_does(tmp_path):
    values = [9.0, math.nan, math.inf, 5.0, 6.0, 4.0, 7.0, 7.0, 7.0, 1.0]
    whole = Run(values, patience=3)
    assert whole.loop.run(10).data == 9
    first = Run(values, tmp_path, patience=3)
    first.loop.run(5)
    second = Run(values, tmp_path, patience=3, resume=True)
    second.loop.run(10)
    assert str(first.measured + second.measured) == str(whole.measured)
    assert second.loop.counters == whole.loop.counters
    assert second.loop.stopped == whole.loop.stopped
    assert second.best.save_state() == whole.best.save_state()
    assert folder.numbers(tmp_path / "best") == [whole.best.step]
    # It stays stopped.
    again = Run(values, tmp_path, patience=3, resume=True)
    assert (again.loop.run(10).data, again.measured) == (9, [])


@pytest.mark.usefixtures("eagerly")
def test_a_run_that_goes_back_takes_the_best_step_back_or_says_so(tmp_path):
    def gone_back(keep):
        place = tmp_path / str(keep)
        run = Run([2.0, 3.0, 1.0], place, patience=9, keep=keep, save=1)
        run.loop.run(3)
        assert folder.numbers(place / "best") == [3]
        run.loop.actions[-1].go_back(run.loop, 2)
        return run.best.step, folder.numbers(place / "best")

    assert gone_back(keep=3) == (1, [1])
    said = r"holds step 3, .* from step 2: there the best value, 2, is that of step"
    with pytest.warns(loops.ResumeWarning, match=said):
        assert gone_back(keep=2) == (1, [3])


class Killed(BaseException):
    pass


@pytest.mark.slow_with("4")
@pytest.mark.exhaustive_with("0", "1", "2", "3", "5")
@pytest.mark.parametrize("moment", range(6))
@pytest.mark.usefixtures("eagerly")
def test_a_kill_in_the_copy_leaves_a_best_step(tmp_path, monkeypatch, moment):
    """The copy is broken off before each thing it does to the folder, with the one before still there or it itself."""
    values = [9.0, 5.0, 4.0, 6.0]
    Run(values, tmp_path, patience=9).loop.run(2)
    left = [moment]

    def counted(function):
        def call(*arguments, **options):
            if "best" in str(arguments[0]) or "best" in str(arguments[-1]):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "copyfile", counted(folder.shutil.copyfile))
        patch.setattr(folder.pathlib.Path, "replace", counted(folder.pathlib.Path.replace))
        patch.setattr(folder.pathlib.Path, "unlink", counted(folder.pathlib.Path.unlink))
        with pytest.raises(Killed):
            Run(values, tmp_path, patience=9, resume=True).loop.run(3)
    kept, _, damaged = folder.newest_whole(tmp_path / "best")
    assert kept in (2, 3)
    assert not damaged
    Run(values, tmp_path, patience=9, resume=True).loop.run(4)
    assert folder.numbers(tmp_path / "best") == [3]
    assert len(list((tmp_path / "best").iterdir())) == 2


def test_stop_when_ends_the_run_and_is_asked_again():
    stop = loops.StopWhen(lambda visit: visit.outputs["loss"][-1] > 3, every=2)
    loop = loops.Loop(lambda x: {"loss": x}, tf.data.Dataset.range(1, 100), actions=[stop])
    assert loop.run(50).data == 4
    assert "step 4" in loop.stopped
    assert loop.run(50).data == 6


def test_stop_when_refuses_an_answer_that_is_none():
    answers = [None, "no", np.array([True, False])]
    stop = loops.StopWhen(lambda visit: answers.pop())
    loop = loops.Loop(lambda x: {"loss": x}, tf.data.Dataset.range(9), steps_per_call=1, actions=[stop])
    for _ in range(3):
        with pytest.raises(scaler.InvalidArgument, match=r"StopWhen\(condition\): it returned .+: expected True or F"):
            loop.run(3)
    assert not answers


GOOD = dict(model=lambda x, training: x, dataset=held_out(), metrics=[keras.metrics.Mean(name="m")], every=1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": 3}, "keras.Model"),
        ({"dataset": [1]}, "tf.data.Dataset"),
        ({"dataset": held_out().repeat()}, "never ends"),
        ({"metrics": []}, "at least one"),
        ({"metrics": ["loss of mine"]}, "keras.metrics.Metric"),
        ({"metrics": [keras.metrics.Mean(), keras.metrics.Mean()]}, "two are named 'mean'"),
        ({"every": 0}, r"every=0.*Seconds"),
        ({"every": 1.5}, "every=1.5"),
        ({"every": True}, "every=True"),
    ],
)
def test_bad_evaluations_are_refused(changed, said):
    with pytest.raises(scaler.InvalidArgument, match=said):
        loops.Evaluate(**{**GOOD, **changed})


def test_bad_followers_are_refused(tmp_path):
    evaluate = loops.Evaluate(**GOOD)
    best = loops.Best(evaluate, "m", "min")
    for wrong, said in [
        (lambda: loops.Best(3, "m"), "hs.Evaluate"),
        (lambda: loops.Best(evaluate, "loss"), "expected one of m"),
        (lambda: loops.Best(evaluate, "m", "up"), "'min' or 'max'"),
        (lambda: loops.Best(evaluate, "m", "max", min_delta=math.nan), "min_delta"),
        (lambda: loops.EarlyStop(evaluate), "hs.Best"),
        (lambda: loops.EarlyStop(best, patience=0), "patience"),
        (lambda: loops.Checkpoint(tmp_path, every=1, best="m"), "hs.Best"),
        (lambda: loops.Checkpoint(tmp_path, every=0), "every=0"),
        (lambda: loops.Checkpoint(tmp_path, every=1, resume="no"), "resume='no'.*: expected True or False"),
        (lambda: loops.Checkpoint(tmp_path, every=1, background=1), "background=1.*: expected True or False"),
        (lambda: loops.Best(evaluate, "m", "max", min_delta="0.1"), "min_delta='0.1'"),
        (lambda: loops.Checkpoint(tmp_path, every=1, run=3), r"Checkpoint\(run=3\): expected a dict"),
        (lambda: loops.Progress(console=3), r"Progress\(console=3\)"),
        (lambda: loops.StopWhen(3), "function"),
        (lambda: loops.StopWhen(lambda: True), "function"),
        (lambda: loops.Call(3, every=1), "function"),
        (lambda: loops.Call(lambda: None, every=1), "function"),
        (lambda: loops.Loop(lambda x: {}, held_out(), actions=[lambda: None]), "callables that take a Visit"),
        (lambda: loops.Seconds(math.nan), "finite"),
    ]:
        with pytest.raises(scaler.InvalidArgument, match=said):
            wrong()
    for action in (loops.EarlyStop(best), loops.Checkpoint(tmp_path, every=1, best=best)):
        loop = loops.Loop(lambda x: {"loss": x}, tf.data.Dataset.range(9), actions=[action])
        with pytest.raises(loops.LoopError, match="not among the loop's actions"):
            loop.run(1)
    loop = loops.Loop(lambda x: {"loss": x}, tf.data.Dataset.range(9), actions=[loops.EarlyStop(best), evaluate])
    with pytest.raises(loops.LoopError, match=r"EarlyStop: .* not among the loop's actions before it"):
        loop.run(1)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.usefixtures("eagerly")
def test_accuracy_by_name_is_that_of_compile(binary):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1 if binary else 3, activation="sigmoid")])
    x, y = np.random.default_rng(0).normal(size=(16, 4)).astype("float32"), np.arange(16) % 3
    kinds = [y > 0] if binary else [y, y[:, None], np.eye(3)[y]]
    model.compile(loss=lambda y, p: p, metrics=["accuracy"])
    expected = model.test_on_batch(x, kinds[0], return_dict=True)["accuracy"]
    for labels in kinds:
        data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(5)
        assert loops.Evaluate(model, data, "accuracy", every=1).measure() == {"accuracy": pytest.approx(expected)}


@pytest.mark.usefixtures("eagerly")
def test_names_of_metrics():
    evaluate = loops.Evaluate(lambda x, training: x + 1.0, held_out(), ["mse", "mae"], every=1)
    assert evaluate.measure() == {"mse": 10.0, "mae": 3.0}
    with pytest.raises(scaler.InvalidArgument, match=r"Did you mean 'accuracy'\?"):
        loops.Evaluate(lambda x, training: x, held_out(), ["acuracy"], every=1)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "before"), [(loops.JsonLines, True), (loops.Csv, False)], ids=["log first", "evaluation first"]
)
@pytest.mark.usefixtures("eagerly")
def test_results_are_kept_beside_the_log(tmp_path, kind, before):
    def run(steps):
        one = Run([5.0, math.nan, 3.0, 2.0, 1.0, 0.5], tmp_path / "saved", save=2, patience=9, resume=True, every=2)
        log = kind(tmp_path / ("steps.jsonl" if kind is loops.JsonLines else "steps.csv"))
        one.loop.actions.insert(0 if before else 2, log)
        one.loop.run(steps)
        return one

    results = tmp_path / "steps.evaluations.jsonl"
    results.write_text('{"step": 2, "validation/value": 9.0}\n{"step": 8, "validation/value": 9.0}\n')
    run(3).loop.actions[-1].save_no_more()
    assert lines_of(results) == [{"step": 2, "validation/value": None}]
    # As after a kill: the steps after the last checkpoint are taken again.
    for path in (tmp_path / "saved").glob("ckpt-3.*"):
        path.unlink()
    with results.open("a") as file:
        file.write('{"step": 4, "validation/value": 7.0}\n{"step": 6, "vali')
    run(6)
    expected = [(2, None), (4, 2.0), (6, 0.5)]
    assert lines_of(results) == [{"step": step, "validation/value": value} for step, value in expected]
    run(6)
    assert len(lines_of(results)) == 3
    np.testing.assert_equal(read_run(tmp_path).evaluations.values, [[np.nan], [2.0], [0.5]])
    loops.observe.report([tmp_path], tmp_path / "report.html")
    assert "Evaluation: validation/value" in (tmp_path / "report.html").read_text()
    assert "evaluated    validation at step 6: value 0.5\n" in text_of_checkpoint(describe(tmp_path / "saved"))


@pytest.mark.usefixtures("eagerly")
def test_a_new_run_removes_the_results_of_the_one_before(tmp_path):
    results = tmp_path / "steps.evaluations.jsonl"
    run = Run([1.0, 2.0])
    run.loop.actions += [loops.JsonLines(tmp_path / "steps.jsonl")]
    run.loop.run(2)
    assert [row["step"] for row in lines_of(results)] == [1, 2]
    # An object of the run before brings the results of that run along.
    again = Run([1.0, 2.0])
    again.loop.actions = [loops.JsonLines(tmp_path / "steps.jsonl"), run.evaluate]
    again.loop.run(1)
    assert [row["step"] for row in lines_of(results)] == [1]
    again.loop.run(2)
    assert [row["step"] for row in lines_of(results)] == [1, 2]
    bare = Run([1.0])
    bare.loop.actions = [loops.JsonLines(tmp_path / "steps.jsonl")]
    bare.loop.run(1)
    assert not results.exists()


@pytest.mark.usefixtures("eagerly")
def test_evaluations_of_one_name_are_kept_apart(tmp_path):
    weight = tf.Variable(1.0)
    each = [
        loops.Evaluate(lambda x, training: x * weight, held_out(values), [Value(name="value")], every=1)
        for values in ([1.0], [2.0])
    ]
    log = loops.JsonLines(tmp_path / "steps.jsonl")
    data = tf.data.Dataset.from_tensors(1.0)
    loops.Loop(lambda x: {"loss": x}, data, steps_per_call=1, actions=[*each, log]).run(1)
    assert lines_of(tmp_path / "steps.evaluations.jsonl") == [
        {"step": 1, "validation/value": 1.0, "validation 2/value": 2.0}
    ]
