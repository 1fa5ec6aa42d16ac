"""Guards `halfstep lab replay` and `halfstep lab tune`: what they print and write, and that training does the same."""

import csv
import json
import re

import command_cases
import numpy as np
import pytest
from recorded_cases import steps_of
from replay_cases import tables

import halfstep as cli
import loops
from loops.replay import train_again
from loops.replay.results import replay_figure
from loops.replay.stepping import named_strategies
from loops.replay.train_again import live
from loops.replay.tune import GRIDS, tune
from loops.run.train import RunOptions, train

pytestmark = pytest.mark.slow

STEPS = 14
USUAL = {
    *("strategy", "skips", "skip_rate", "mean_log2_scale", "final_scale", "flushed", "at_floor", "at_ceiling"),
    *("uncertain", "may_differ_at", "intervals", "highest_skip_rate", "may_stall", "runs"),
}
TRAINED = {
    *("agreement", "same_skips", "trained_skips", "trained_mean_log2_scale", "trained_final_scale", "parts_at"),
    "difference",
}
HIGH = "dynamic:initial_scale=2**30,growth_interval=3"


@pytest.fixture(scope="module")
def once(small, tmp_path_factory):
    """A run with a trace and checkpoints, which begins far too high."""
    out = tmp_path_factory.mktemp("recorded")
    options = RunOptions("mixed_float16", "static:64", STEPS, 3, batch_size=32)
    train(small, options, out, checkpoint_every=5, trace_every=1)
    return out


@pytest.fixture
def run(once, small_digits):
    return once


def called(capsys, *arguments):
    """The status, standard output and standard error of `halfstep lab replay`."""
    return command_cases.run(capsys, "lab", "replay", *arguments)


@pytest.mark.exhaustive
def test_it_prints_and_writes_what_it_says(run, capsys, tmp_path):
    scales, figure = tmp_path / "scales.csv", tmp_path / "scales.svg"
    chosen = ["--strategy", HIGH, "--strategy", "headroom", "--strategy", "histogram"]
    status, printed, _ = called(capsys, run, *chosen, "--json", "--scales", scales, "--out", figure)
    assert status == 0
    said = json.loads(printed)
    assert {*said} == {"steps", "strategies", "lacking"}
    assert said["steps"] == STEPS
    assert [{*one} for one in said["strategies"]] == [USUAL] * 3
    first = said["strategies"][0]
    assert (first["strategy"], first["skips"] / STEPS) == (HIGH, first["skip_rate"])
    with scales.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", HIGH, "headroom", "histogram"]
    assert [int(row[0]) for row in rows[1:]] == list(range(1, STEPS + 1))
    assert float(rows[1][1]) == 2.0**30
    assert np.log2([float(row[1]) for row in rows[1:]]).mean() == pytest.approx(first["mean_log2_scale"])
    assert figure.read_text().startswith("<svg")
    status, printed, _ = called(capsys, run / "trace.arrow", "--strategy", "none")
    assert status == 0
    assert printed.startswith(f"{STEPS} steps")
    assert "2^0.00" in printed


def test_training_does_what_was_replayed(run, capsys, monkeypatch):
    made, real = [], train_again.train_again
    monkeypatch.setattr(train_again, "train_again", lambda *arguments: made.append(real(*arguments)) or made[-1])
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    status, printed, _ = called(capsys, run, "--validate", "--json", "--strategy", "dynamic", "--strategy", HIGH)
    assert status == 0
    low, high = json.loads(printed)["strategies"]
    assert {*low} == USUAL | TRAINED
    assert (low["agreement"], low["same_skips"], low["parts_at"]) == (1.0, True, None)
    assert high["trained_skips"] > 2
    assert high["agreement"] > 0.5
    assert (low["difference"], high["difference"]["steps"]) == (None, STEPS - high["may_differ_at"])
    assert sorted(path.stat().st_mtime_ns for path in run.rglob("*")) == before

    # Where training parts from the replay is said.
    scales = made[0].scales.copy()
    scales[5:] /= 2
    monkeypatch.setattr(train_again, "train_again", lambda *arguments: made[0]._replace(scales=scales))
    _, printed, _ = called(capsys, run, "--validate", "--strategy", "dynamic")
    assert "the same scale at 5 of 14 steps (35.7%)" in printed
    assert "parts at step 6: 16384 trained, 32768 replayed; step 5 had other gradients" in printed


def test_a_run_that_cannot_be_laid_beside(run, tmp_path, small):
    train(small, RunOptions("float32", "none", 2, 0, batch_size=32), tmp_path)
    with pytest.raises(loops.LoopError, match="no checkpoint before its last step"):
        live(tmp_path, named_strategies("none"))
    with pytest.raises(loops.LoopError, match="lacks some steps"):
        train_again._recorded(steps_of([{"step": 2, "loss_scale": 1.0, "applied": True}]), 0, 2)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["RUN", "--strategy", "dynamc"], 2, "did you mean 'dynamic'"),
        (["nowhere", "--strategy", "dynamic"], 1, "No such file"),
        (["EMPTY", "--strategy", "dynamic"], 1, "has no trace"),
        (["RUN", "--strategy", "dynamic", "--scales", "EMPTY"], 1, "--scales.*Is a directory"),
        (["RUN", "--strategy", "dynamic", "--out", "EMPTY/x.doc"], 1, r"Name a .png"),
        (["RUN", "RUN", "--strategy", "dynamic", "--scales", "x"], 2, "about one trace"),
        (["RUN", "RUN", "--strategy", "dynamic", "--validate"], 2, "train one run"),
        (["RUN/trace.arrow", "--strategy", "dynamic", "--validate"], 2, "a trace alone is not enough to train again"),
        (["RUN", "--strategy", "dynamic", "--build", "a:b"], 2, "--validate or --live"),
        (["RUN", "--strategy", "dynamic", "--step", "3"], 2, "--live"),
        (["RUN", "--strategy", "dynamic", "--live", "--step", "99"], 2, "ends at step 14"),
        (["RUN", "--strategy", "dynamic", "--live", "--scales", "x"], 2, "cannot be combined with --validate"),
    ],
)
def test_what_cannot_be_is_one_line(run, capsys, tmp_path, arguments, status, said):
    given = [argument.replace("RUN", str(run)).replace("EMPTY", str(tmp_path)) for argument in arguments]
    got, printed, errors = called(capsys, *given)
    assert (got, printed) == (status, "")
    (line,) = errors.splitlines()[-1:]
    assert re.search(said, line)


def test_a_figure_of_many_steps_and_strategies():
    steps = np.arange(1, 5001)
    figure = replay_figure(steps, np.full(5000, 2.0**10), {f"s{n}": np.full(5000, 2.0**n) for n in range(9)})
    (axes,) = figure.axes
    assert len(axes.lines) == 9
    assert all(len(line.get_xdata()) <= 2000 for line in axes.lines)


def flushing(seed, spread, share):
    """A run whose limit lies about 2^24, and of whose gradients Dynamic's 2^15 makes a share zero."""
    counts = {step: {150 - 24: 1, 150 - 12: round(1 / share) - 1} for step in range(1, 61)}
    return tables(2.0 ** np.random.default_rng(seed).normal(-8, spread, 60), scale=2.0**20, counts=counts)


@pytest.mark.parametrize(
    ("seeds", "spread", "share", "remark"),
    [
        (1, 0.1, 0.5, "no gain can be stated. Too few runs for an interval"),
        (5, 0.1, 0.5, "no gain can be stated. Too few runs for an interval"),
        (6, 1.5, 0.125, "the intervals allow -"),
        (6, 0.1, 0.5, None),
    ],
)
def test_a_gain_is_only_stated_beyond_the_intervals(monkeypatch, seeds, spread, share, remark):
    monkeypatch.setitem(GRIDS, "dynamic", {"initial_scale": ["2**20"], "growth_interval": [5]})
    found = tune([flushing(seed, spread, share) for seed in range(seeds)], "dynamic")
    if remark is None:
        assert found.best == "dynamic:initial_scale=2**20,growth_interval=5"
        assert 0 < found.gain_interval[0] < found.gain < found.gain_interval[1]
        assert "by the intervals, on the held-out steps" in str(found)
        return
    assert (found.best, found.gain, found.remark is None) == ("dynamic", 0.0, False)
    assert remark in str(found)
    assert "Nothing was better than the default beyond the intervals" in str(found)


def test_a_static_scale_that_may_skip_is_never_returned(monkeypatch):
    """At 2^16 one step of thirty is skipped, and less is flushed; all that follow may be skipped as well."""
    monkeypatch.setitem(GRIDS, "static", {"": ["2**4", "2**14", "2**16"]})
    counts = {step: {150 - 24: 1} for step in range(1, 31)}
    trace = tables([2.0**-3] * 25 + [1.5] + [2.0**-3] * 4, scale=2.0**14, counts=counts)
    found = tune([trace, trace], "static")
    assert (found.best, found.skip_rates[0]) == ("static:2**14", 0.0)
    low = tables([100.0] * 30, scale=2.0**4, counts=counts)
    found = tune([low, low], "static")
    assert (found.best, found.gain_interval) == ("static:2**4", None)
    assert "static:1024 may skip more than 1% of the steps of a run." in str(found)
    with pytest.raises(loops.LoopError, match="each static scale of the 4 that were tried may skip more than 1%"):
        tune([tables([1e6] * 30, scale=2.0**4, counts=counts)] * 2, "static")


def test_the_default_stays_where_the_best_is_worse_on_what_was_held_out(monkeypatch):
    monkeypatch.setitem(GRIDS, "static", {"": ["2**4", "2**24"]})
    counts = {step: {150 - 24: 1} for step in range(1, 21)}
    low = tables([2.0**-30] * 20, scale=2.0**20, counts=counts)
    high = tables([20.0] * 20, scale=2.0**4, counts={step: {150: 1} for step in range(1, 21)})
    found = tune([low, high], "static")
    assert (found.best, found.gain) == ("static:1024", 0.0)
    assert "Nothing was better" in str(found)


@pytest.mark.parametrize(
    ("trace", "strategy", "said"),
    [(tables([1.0] * 9), "static", "no histograms"), (tables([1.0]), "static", "too few")],
)
def test_what_cannot_be_tuned(trace, strategy, said):
    with pytest.raises(loops.LoopError, match=said):
        tune(trace, strategy)


def test_tune_as_a_command(run, capsys, monkeypatch):
    monkeypatch.setitem(GRIDS, "static", {"": ["2**4", "2**8"]})
    assert cli.main(["lab", "tune", str(run), "--strategy", "static", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["default"], said["tried"]) == ("static:1024", 3)
    assert cli.main(["lab", "tune", str(run), "--strategy", "apex"]) == 2
    assert "expected one of static, dynamic" in capsys.readouterr().err
