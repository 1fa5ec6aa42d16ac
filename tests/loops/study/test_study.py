"""Guards the study: what it runs and leaves, how it compares, and that looking at gradients changes nothing."""

import dataclasses
import json
import math

import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.run.train import RunOptions, train
from loops.study.compare import run_study, summarise
from loops.study.measured import HIGHEST, LOWEST, GradientProbe
from loops.study.setups import EMULATED, SETUPS, SMALL, Setup, choose_setups, strategy_setups

pytestmark = pytest.mark.slow

CHOSEN = ("float32", "small-mixed-none")


@pytest.fixture(scope="module")
def study(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "made"
    labels, said = [], []

    def progress(label):
        labels.append(label)
        return lambda visit: None

    summary = run_study(small, choose_setups(CHOSEN), steps=20, seeds=2, out=out, progress=progress, say=said.append)
    # Of four runs, the first of each set-up.
    assert [text.split(" done")[0] for text in said] == ["study: 1 of 4 runs", "study: 3 of 4 runs"]
    return summary, out, labels


def test_a_study_leaves_every_run_and_a_summary(study):
    summary, out, labels = study
    folders = [f"runs/{name}-seed{seed}" for name in CHOSEN for seed in (0, 1)]
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    expected = [f"{folder}/{file}" for folder in folders for file in ("steps.jsonl", "summary.json")]
    assert files == sorted([*expected, "summary.json"])
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (summary["task"], summary["steps"], summary["seeds"]) == ("digits", 20, 2)
    assert [row["name"] for row in summary["setups"]] == list(CHOSEN)
    assert [run["folder"] for run in summary["runs"]] == folders
    assert [run["seed"] for run in summary["runs"]] == [0, 1, 0, 1]
    assert labels == [f"{name} seed {seed}" for name in CHOSEN for seed in (0, 1)]
    for run in summary["runs"]:
        alone = json.loads((out / run["folder"] / "summary.json").read_text())
        assert {name: run[name] for name in alone} == alone
        assert (out / run["folder"] / "steps.jsonl").read_text().count("\n") == 20


def test_a_row_is_the_mean_of_its_runs(study):
    summary = study[0]
    for row in summary["setups"]:
        own = [run for run in summary["runs"] if run["setup"] == row["name"]]
        assert row["accuracy"] == np.mean([run["accuracy"] for run in own])
        assert row["final_loss"] == np.mean([run["final_loss"] for run in own])
    assert summary["setups"][0]["difference"] == 0
    # Without scaling float16 loses most of what a loss a million times smaller has to say.
    assert summary["setups"][1]["flushed_activations"] > 0.5


def test_counts_of_gradients_agree_with_each_other(study, small):
    values = sum(math.prod(v.shape) for v in small.model("float32").trainable_variables)
    for run in study[0]["runs"]:
        for kind, counts in run["gradients"].items():
            assert sum(counts["histogram"]) == sum(counts["scaled_histogram"]) == counts["nonzero"], kind
            assert counts["flushed"] + counts["overflowed"] <= counts["nonzero"]
            assert len(counts["histogram"]) == HIGHEST - LOWEST + 1
            assert counts["lowest_exponent"] == LOWEST
            assert counts["flushed_share"] == counts["flushed"] / counts["nonzero"]
        visits = 1
        weights = run["gradients"]["weights"]
        assert weights["zero"] + weights["nonzero"] == visits * values


def by_numpy(values, loss_scale):
    """The same counts, the slow way."""
    values = np.concatenate([np.asarray(value, np.float32).ravel() for value in values])
    nonzero = values[values != 0]
    scaled = nonzero * np.float32(loss_scale)
    with np.errstate(over="ignore"):
        half = scaled.astype(np.float16)

    def histogram(numbers):
        exponents = np.clip(np.frexp(numbers)[1] - 1, LOWEST, HIGHEST)
        return np.bincount(exponents - LOWEST, minlength=HIGHEST - LOWEST + 1)

    return {
        "histogram": histogram(nonzero),
        "scaled_histogram": histogram(scaled),
        "zero": np.sum(values == 0),
        "nonzero": len(nonzero),
        "flushed": np.sum(half == 0),
        "overflowed": np.sum(np.isinf(half)),
    }


@pytest.mark.exhaustive_with("1.0-1073741824.0", "9.5367431640625e-07-1024.0")
@pytest.mark.parametrize(("factor", "loss_scale"), [(1.0, 1.0), (SMALL, 2.0**10), (1.0, 2.0**30)])
def test_counts_are_those_of_numpy(digits, factor, loss_scale):
    model, probe = digits.model("float16"), GradientProbe(digits, examples=16)
    counted = probe.count(model, factor, loss_scale)
    twin = digits.model("float32")
    for variable, original in zip(twin.variables, model.variables, strict=True):
        variable.assign(original.numpy().astype(np.float32))
    with tf.GradientTape() as tape:
        loss = digits.loss(digits.labels[:16], twin(digits.images[:16], training=True)) * factor
    expected = by_numpy(tape.gradient(loss, twin.trainable_variables), loss_scale)
    assert counted["weights"]["nonzero"] + counted["weights"]["zero"] == expected["nonzero"] + expected["zero"]
    for name, value in expected.items():
        # Eager kernels may round a value across the border of a bin.
        assert np.sum(np.abs(counted["weights"][name] - value)) <= 0.01 * expected["nonzero"], name
    if loss_scale == 2.0**30:
        assert counted["weights"]["overflowed"] > 0


def test_looking_at_gradients_changes_no_bit_of_the_run(study, small, tmp_path):
    setup = choose_setups(CHOSEN)[1]
    options = RunOptions(setup.policy, setup.strategy, 20, 1, setup.masters, setup.loss_factor)
    with pytest.warns(scaler.ScaleWarning, match="norm of exactly zero"):
        alone = train(small, options, tmp_path)
    watched = next(run for run in study[0]["runs"] if run["folder"] == "runs/small-mixed-none-seed1")
    assert alone["weights_digest"] == watched["weights_digest"]
    assert alone["final_loss"] == watched["final_loss"]


def test_weights_that_are_not_finite_are_not_counted(small):
    model = small.model("float16")
    action = GradientProbe(small, examples=4).counting(model, 1.0)
    visit = loops.Visit(loops.Counters(1), {"loss_scale": np.float32([1.0])}, 0.0, 1)
    action(visit)
    before = action.counts["weights"]["nonzero"]
    model.trainable_variables[0].assign(np.full(model.trainable_variables[0].shape, np.nan))
    action(visit)
    assert action.counts["weights"]["nonzero"] == before > 0


def hand_made(setup, accuracy, loss=1.0, skipped=0, flushed=0, nonzero=10):
    gradients = {kind: {"flushed": flushed, "nonzero": nonzero} for kind in ("weights", "activations")}
    return {"setup": setup, "accuracy": accuracy, "final_loss": loss, "skipped": skipped, "gradients": gradients}


def test_summarise_on_runs_made_by_hand():
    runs = [
        hand_made("float32", 0.5),
        hand_made("float32", 0.75),
        hand_made("mixed-none", 0.25, loss=2.0, skipped=3, flushed=1, nonzero=10),
        hand_made("mixed-none", 0.5, loss=float("nan"), skipped=0, flushed=5, nonzero=30),
        hand_made("float16-none", 0.1, nonzero=0),
    ]
    reference, mixed, pure = summarise(choose_setups(["float32", "mixed-none", "float16-none"]), runs)
    assert (reference["accuracy"], reference["accuracy_min"], reference["accuracy_max"]) == (0.625, 0.5, 0.75)
    assert (reference["difference"], mixed["difference"]) == (0, -25)
    assert (reference["flushed_weights"], reference["flushed_activations"]) == (None, None)
    assert math.isnan(mixed["final_loss"])
    assert mixed["skipped"] == 1.5
    assert mixed["flushed_weights"] == mixed["flushed_activations"] == 6 / 40
    assert pure["flushed_weights"] is None
    assert mixed["title"] == "mixed float16, no scaling"
    alone = summarise(choose_setups(["mixed-none"]), runs)
    assert [row["difference"] for row in alone] == [None]


def test_set_ups_are_chosen_by_name_in_the_order_of_the_study():
    assert choose_setups([]) == list(SETUPS)
    assert [setup.name for setup in choose_setups(["small-float32", "float32", "float32"])] == [
        "float32",
        "small-float32",
    ]
    assert len({setup.name for setup in SETUPS}) == len(SETUPS) == 9
    with pytest.raises(scaler.InvalidArgument, match="set-up 'float8': expected one of float32, mixed-none"):
        choose_setups(["float32", "float8"])


def test_set_ups_in_emulated_formats_run_if_they_are_named():
    assert [setup.name for setup in choose_setups(["emulated-nvfp4", "float32"])] == ["float32", "emulated-nvfp4"]
    assert not {setup.name for setup in choose_setups([])} & {setup.name for setup in EMULATED}


def test_every_set_up_makes_valid_options():
    for setup in (*SETUPS, *EMULATED):
        fields = {field.name for field in dataclasses.fields(Setup)} - {"name", "title"}
        options = RunOptions(steps=1, seed=0, **{name: getattr(setup, name) for name in fields})
        assert all(getattr(options, name) == getattr(setup, name) for name in fields)


def test_strategies_are_set_ups_beside_float32():
    float32, *setups = strategy_setups(["headroom", "static:2**10", "headroom"])
    assert float32 == SETUPS[0]
    assert [(setup.name, setup.title, setup.strategy) for setup in setups] == [
        ("headroom", "headroom", "headroom"),
        ("static-2-10", "static:2**10", "static:2**10"),
    ]
    assert {setup.policy for setup in setups} == {"mixed_float16"}
    with pytest.raises(scaler.InvalidArgument, match="did you mean 'headroom'"):
        strategy_setups(["pytorch", "headrom"])


def test_strategies_whose_names_look_alike_have_folders_of_their_own():
    names = [setup.name for setup in strategy_setups(["static:2**10", "static:2** 10", "static:2**(10)"])]
    assert names == ["float32", "static-2-10", "static-2-10-2", "static-2-10-"]
