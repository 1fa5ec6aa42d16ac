"""Guards one run: what it leaves, that its digest says whether two ended in the same place, and bad options."""

import json
import math
import re
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import start, wait_for
from retried_cases import EVERY, STEPS, train_with_retry

import scaler
from loops.record.files import write_json
from loops.run.train import RunOptions, _LastLosses, train, weights_digest
from loops.study.compare import SharedTrace


def unnumbered(text):
    """Without the numbers that Keras gives to the names of a process's models."""
    return re.sub(r"_\d+/", "/", text)


OPTIONS = RunOptions("mixed_float16", "dynamic:initial_scale=4096,growth_interval=5", 20, 0)


@pytest.fixture(scope="module")
def small_run(small, tmp_path_factory):
    """A run of a network that is traced in no time."""
    out = tmp_path_factory.mktemp("run")
    return train(small, OPTIONS, out), out


@pytest.mark.slow
def test_a_run_leaves_a_line_for_every_step_and_a_summary(small_run):
    summary, out = small_run
    assert sorted(path.name for path in out.iterdir()) == ["steps.jsonl", "summary.json"]
    assert json.loads((out / "summary.json").read_text()) == summary
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    scale, good = 2.0**12, 0
    for line in lines:
        of_scaler = {"attempted", "applied", "loss_scale", "grad_norm", "clipped_norm", "cause", "variable"}
        assert set(line) == {"step", "loss", *of_scaler}
        assert (line["cause"] is None) == (line["variable"] is None) == line["applied"]
        assert line["attempted"] is True
        assert line["loss_scale"] == scale
        good = good + 1 if line["applied"] else 0
        if not line["applied"]:
            scale /= 2
        elif good == 5:
            scale, good = scale * 2, 0
    assert summary["loss_scale"] == scale > 2.0**12
    np.testing.assert_allclose(summary["final_loss"], np.mean([line["loss"] for line in lines[-2:]]), rtol=1e-6)
    assert summary["applied"] == sum(line["applied"] for line in lines)


@pytest.mark.slow
def test_the_same_options_end_in_the_same_bits(small_run, small, tmp_path):
    summary, out = small_run
    assert train(small, OPTIONS, tmp_path) == summary
    rows = [unnumbered((place / "steps.jsonl").read_text()) for place in (tmp_path, out)]
    assert rows[0] == rows[1]


def one_of_each():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.build([None, 3])
    return model


def test_a_digest_sees_the_last_bit_of_every_variable():
    model = one_of_each()
    before = weights_digest(model)
    assert weights_digest(model) == before
    for variable in model.variables:
        value = variable.numpy()
        bits = value.copy().view(np.uint32)
        bits.ravel()[-1] ^= 1
        variable.assign(bits.view(np.float32))
        assert weights_digest(model) != before
        variable.assign(value)
        assert weights_digest(model) == before


def test_a_digest_tells_zeros_signs_shapes_and_dtypes_apart_but_not_names():
    def digest(shape, dtype, value=0.0):
        keras.utils.set_random_seed(0)
        layer = keras.layers.Dense(shape[1], use_bias=False, kernel_initializer="zeros", dtype=dtype)
        model = keras.Sequential([keras.Input(shape[:1], dtype=dtype), layer])
        layer.kernel.assign(np.full(shape, value))
        return weights_digest(model)

    digests = [digest((2, 6), "float32"), digest((6, 2), "float32"), digest((2, 6), "float16")]
    digests += [digest((2, 6), "bfloat16"), digest((2, 6), "float32", -0.0)]
    assert len(set(digests)) == 5
    assert digest((2, 6), "float32") == digests[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "float8"}, ["policy 'float8'", "mixed_float16", "bfloat16"]),
        ({"strategy": "warp"}, ["strategy 'warp'", "dynamic"]),
        ({"strategy": "static:0"}, ["loss_scale=0"]),
    ],
)
def test_options_that_cannot_work_are_named(options, named):
    with pytest.raises(scaler.InvalidArgument) as caught:
        RunOptions(**{"policy": "float32", "strategy": "none", "steps": 1, "seed": 0, **options})
    for text in named:
        assert text in str(caught.value)


def test_a_folder_that_cannot_be_made_is_said_before_training(digits, tmp_path):
    (tmp_path / "file").write_text("mine")
    visits = []
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            train(digits, RunOptions("float32", "none", 1, 0), out, lambda model: [visits.append])
    assert not visits
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_a_run_of_one_step_has_a_final_loss_and_one_that_breaks_no_summary_of_an_older_one(small, tmp_path):
    losses, trace = [], SharedTrace()
    options = RunOptions("float32", "none", 1, 0)
    summary = train(small, options, tmp_path, lambda model: [losses.append], built_by=trace.build)
    assert summary["final_loss"] == losses[0].outputs["loss"][0]
    assert (tmp_path / "summary.json").exists()

    def stop(visit):
        raise KeyboardInterrupt

    options = RunOptions("float32", "none", 2, 0)
    with pytest.raises(KeyboardInterrupt):
        train(small, options, tmp_path, lambda model: [stop], built_by=trace.build)
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]
    assert (tmp_path / "steps.jsonl").read_text().count("\n") == 2


def test_json_is_whole_and_has_no_nan(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (-float("inf"), "x")}, "e": None})
    assert json.loads(path.read_text()) == {"a": None, "b": [1.5, None], "c": {"d": [None, "x"]}, "e": None}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text())["b"] == [1.5, None]


def test_the_losses_that_a_longer_run_did_not_keep_are_in_its_log(tmp_path):
    """A run with more steps kept none of its first ones, and goes on with no step left."""
    log = tmp_path / "steps.jsonl"
    rows = [{"step": step, "loss": loss} for step, loss in enumerate([9.0, 0.1, 0.2], 28)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = _LastLosses(20, tmp_path / "summary.json")
    assert math.isnan(last.mean(tmp_path / "none"))
    last = _LastLosses(30, tmp_path / "summary.json")
    last.load_state([])
    assert last.mean(log) == np.mean([9.0, float(np.float32(0.1)), float(np.float32(0.2))])
    log.write_text(json.dumps({"step": 30, "loss": None}) + "\n")
    assert math.isnan(last.mean(log))


STRATEGIES = {
    "grows": "dynamic:growth_interval=3",
    "skips at first": "dynamic:initial_scale=1099511627776,growth_interval=3",
}


@pytest.mark.slow
@pytest.mark.exhaustive_with("skips at first", "grows")
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_later_run_is_the_run_that_it_is_alone(small, tmp_path, strategy):
    trace = SharedTrace()
    for seed in (0, 1):
        options = RunOptions("mixed_float16", strategy, steps=60, seed=seed)
        shared = train(small, options, tmp_path / f"shared{seed}", built_by=trace.build)
    alone = train(small, options, tmp_path / "alone")
    assert shared == alone
    rows = [unnumbered((tmp_path / name / "steps.jsonl").read_text()) for name in ("shared1", "alone")]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_is_traced_once_for_all_seeds(small, tmp_path):
    trace, loops = SharedTrace(), []

    def build(*arguments, **settings):
        loops.append(trace.build(*arguments, **settings))
        return loops[-1]

    for seed in range(3):
        train(small, RunOptions("mixed_float16", "dynamic", steps=10, seed=seed), tmp_path / str(seed), built_by=build)
    first, *others = (loop.calls for loop in loops)
    assert all(one is first for one in others)
    assert first._many.experimental_get_tracing_count() == 1
    assert isinstance(loops[-1].position.iterator, tf.data.Iterator)


FAR_TOO_HIGH = 2.0**40
LOW = {"float32": 2.0**10}
SOUND = {("digits", 1): 2.0**16, ("digits", 2): 2.0**16, ("text", 1): 2.0**16, ("text", 2): 2.0**17}
"""By the task and the replicas, of which each of two has half of the loss."""
KILLS = (8, 17)
"""Each is some steps after a checkpoint, so that these are taken again."""


def ended(place, *arguments):
    """What the run comes to from where it is."""
    place.mkdir(exist_ok=True)
    process = start(train_with_retry, place, *arguments)
    process.join(600)
    assert process.exitcode == 0
    return json.loads((place / "end.json").read_text())


def killed(place, step, *arguments):
    """Has the run go on to a step, and kills it there."""
    place.mkdir(exist_ok=True)
    process = start(train_with_retry, place, *arguments, step)
    assert wait_for(lambda: (place / f"at {step}").exists(), seconds=600, process=process, pause=0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (place / "end.json").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize(("name", "replicas"), SOUND)
def test_two_kills_and_a_far_too_high_scale_change_no_bit(name, replicas, policy, tmp_path):
    assert all(step % EVERY for step in KILLS)
    run = name, replicas, policy
    sound = ended(tmp_path / "sound", *run, LOW.get(policy, SOUND[name, replicas]))
    whole = ended(tmp_path / "whole", *run, FAR_TOO_HIGH)
    for step in KILLS:
        killed(tmp_path / "killed", step, *run, FAR_TOO_HIGH)
    last = ended(tmp_path / "killed", *run, FAR_TOO_HIGH)
    assert last["bits"] == whole["bits"] == sound["bits"]
    assert last["scale"] == whole["scale"]
    assert (whole["attempted"], whole["applied"]) == (last["attempted"], last["applied"]) == (STEPS, STEPS)
    # 2^40 is too high for float16 alone, where a later step may need a retry from any scale.
    assert (whole["retries"] > sound["retries"]) == (policy == "mixed_float16")
