"""Guards what is read of a recorded run: each step once, from a trace, a log or both, whatever a kill left."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_cases import write_run

import loops
import scaler
from loops.record import as_recorded, read_run
from loops.record.skips import not_logged
from loops.record.steps import Steps, joined
from loops.record.summary import digest, sentence
from loops.record.trace.file import contents
from loops.views.chart import envelope, moving_mean, sampled


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def test_a_trace_and_a_log_are_one_run(folder):
    run = read_run(folder)
    assert run.step.tolist() == list(range(1, 61))
    assert run.step[run.skipped].tolist() == [3, 4]
    assert run.column("loss")[1] == 1.5
    # 4 and 8 at a scale of 2^15: 8 x 2^12 is the largest power of two below 65520.
    assert run.margin[0] == 12.0
    assert run.margin[2] < 0
    assert run.tensors.amax.shape == (60, 3)
    assert run.tensors.frames[-1] == 60
    assert run.notes == ()


def test_the_log_alone_says_what_is_missing_and_how_to_record_it(folder, tmp_path):
    run = read_run(folder / "steps.jsonl")
    assert run.step[run.skipped].tolist() == [3, 4]
    assert run.tensors is None
    (note,) = run.notes
    assert "hs.Trace(" in note
    assert "observe.watch(model)" in note
    alone = read_run(write_run(tmp_path, trace=True, log=False))
    assert alone.step[alone.skipped].tolist() == [3, 4]
    assert alone.notes == ()


def test_what_the_trace_lacks_comes_from_the_log(folder, tmp_path):
    """A log of a program's own, with the causes that its trace has not, and fewer of the steps."""
    for name in ("trace.arrow", "steps.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    lines = [{**line, "grad_norm": 2.0, "cause": "OVERFLOW" if not line["applied"] else None} for line in lines[:30]]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert {cause: steps.tolist() for cause, steps in run.causes.items()} == {"OVERFLOW": [3, 4]}
    assert np.nansum(run.column("grad_norm")) == 60.0
    assert len(run) == 60


def test_torn_and_foreign_lines_are_passed_over_and_the_last_of_a_step_counts(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(
        '{"step": 2, "loss": 1.0}\n[]\nnot json\n{"step": 1, "loss": null}\n{"step": 2, "loss": 5}\n{"step": 3,'
    )
    run = read_run(tmp_path)
    assert run.step.tolist() == [1, 2]
    np.testing.assert_array_equal(run.column("loss"), [np.nan, 5.0])
    assert any("3 incomplete or foreign lines" in note for note in run.notes)


def test_a_csv_is_a_log(tmp_path):
    text = "step,applied,attempted,cause,loss,loss_scale\n1,1,1,0,nan,8.0\n2,0,1,3,0.5,8.0\n3,1"
    (tmp_path / "steps.csv").write_text(text)
    run = read_run(tmp_path)
    assert run.step.tolist() == [1, 2]
    assert list(run.causes) == ["OVERFLOW"]
    assert np.isnan(run.column("loss")[0])


def test_a_torn_trace_is_read_up_to_there(folder, tmp_path):
    (tmp_path / "trace.arrow").write_bytes((folder / "trace.arrow").read_bytes()[:-100])
    run = read_run(tmp_path)
    assert 0 < len(run) < 61
    assert any("incomplete or damaged" in note for note in run.notes)


def test_a_damaged_trace_beside_a_log_is_a_note(folder, tmp_path):
    (tmp_path / "steps.jsonl").write_bytes((folder / "steps.jsonl").read_bytes())
    (tmp_path / "trace.arrow").write_bytes(b"nothing of the kind")
    run = read_run(tmp_path)
    assert len(run) == 60
    assert any("not a trace of this version" in note for note in run.notes)


def test_a_trace_that_is_damaged_before_its_first_step_is_called_damaged(folder, tmp_path):
    data = (folder / "trace.arrow").read_bytes()
    opening = next(end for end in range(0, len(data), 8) if contents(data[:end]).schema is not None)
    (tmp_path / "trace.arrow").write_bytes(data[: opening + 40])
    with pytest.raises(loops.LoopError, match=r"no step can be read there\. .* is incomplete or damaged at byte"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda place: None, scaler.InvalidArgument, "no such folder"),
        (lambda place: place.mkdir(), loops.LoopError, "no step is recorded there"),
        (lambda place: (place.mkdir(), (place / "steps.jsonl").touch()), loops.LoopError, "no step is recorded there"),
        (
            lambda place: (place.mkdir(), (place / "a.jsonl").touch(), (place / "b.jsonl").touch()),
            loops.LoopError,
            "a.jsonl, b.jsonl",
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, make, error, said):
    make(tmp_path / "run")
    with pytest.raises(error, match=said):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("source", [7, {}, {"loss": [[1.0]]}, {"loss": [1.0], "applied": [1, 0]}, {"name": "x"}])
def test_what_holds_no_run_is_refused(source):
    with pytest.raises(scaler.InvalidArgument, match="expected"):
        as_recorded(source)


def test_arrays_and_tables_are_runs(folder):
    run = as_recorded({"loss": [1.0, 2.0], "applied": [True, False], "cause": [None, "LOSS"]})
    assert run.step.tolist() == [1, 2]
    assert {cause: steps.tolist() for cause, steps in run.causes.items()} == {"LOSS": [2]}
    assert len(as_recorded(loops.observe.read(folder / "trace.arrow"))) == 60


def test_the_margin_is_what_is_there_at_least():
    """Of a step that was not finite, and where no scale helps, what is there at most."""
    arrays = {
        "loss_scale": [8.0] * 4,
        "critical_low": [16.0, 0.0, 0.0, np.inf],
        "critical_high": [64.0, 4.0, 0.0, np.inf],
    }
    run = as_recorded(arrays)
    np.testing.assert_array_equal(run.margin, [1.0, -1.0, -np.inf, np.nan])
    np.testing.assert_array_equal(run.critical, [16.0, 4.0, np.nan, np.nan])


def test_a_digest_counts_and_its_sentence_says_so(folder):
    run = read_run(folder)
    found = digest(run)
    assert (found.steps, found.attempts, found.skips, found.by_cause) == (60, 60, 2, {"unknown": 2})
    assert (found.final_scale, found.mean_log2_scale, found.margin) == (2.0**15, 15.0, 12.0)
    assert found.final_loss == pytest.approx(np.mean([3.0 / step for step in range(55, 61)]))
    said = sentence(run, found)
    assert "60 steps, 2 skipped (3.3%)" in said
    assert "from 3 to 0.0522" in said
    assert "ended at 2^15, 12 octaves below" in said


@pytest.mark.parametrize(
    "columns",
    [
        {"loss": [np.nan] * 3, "applied": [0] * 3},
        {"loss": [np.nan, np.nan, 2.0], "applied": [0, 1, 1]},
        {"loss": [np.nan] * 2, "applied": [0, 1], "cause": ["LOSS", ""]},
        {"loss": [1.0, np.nan], "applied": [1, 0]},
        {"loss": [1.0], "applied": [0]},
        {"loss": [1.0] * 4, "attempted": [0, 1, 0, 1], "applied": [0, 1, 0, 0]},
        {"loss": [1.0]},
        {"loss": [1.0] * 2, "applied": [1, 1], "loss_scale": [1.0, 1.0]},
    ],
    ids=str,
)
def test_the_sentence_of_a_run_that_went_otherwise(snapshot, columns):
    run = as_recorded({name: np.array(values) for name, values in columns.items()})
    assert sentence(run, digest(run)) == snapshot


def test_no_extreme_is_lost_in_columns():
    rng = np.random.default_rng(0)
    values = rng.normal(size=10_000)
    values[[17, 4444]] = 100.0, -100.0
    values[6000:6200] = np.nan
    found = envelope(np.linspace(0, 1, 10_000), values, 100)
    assert (found.low.min(), found.high.max()) == (-100.0, 100.0)
    assert len(found.x) == 98
    assert found.broken.sum() == 1
    few = envelope(np.array([0.0, 0.5, 1.0]), np.array([1.0, np.nan, 3.0]), 100)
    assert (few.x.tolist(), few.broken.tolist()) == ([0.0, 1.0], [False, True])


def test_a_huge_loss_does_not_hide_those_after_it():
    losses = np.array([1.0, 1e300, *[0.5] * 6, np.finfo(np.float64).max, np.finfo(np.float64).max])
    assert moving_mean(losses, 3)[[0, 3, 4, 5, 6]].tolist() == [(1.0 + 1e300) / 2, *[0.5] * 4]
    assert moving_mean(losses, 3)[-1] == losses[-1]


@given(st.lists(st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf, 1e30]), max_size=40), st.integers(1, 9))
def test_a_moving_mean_is_that_of_its_window(values, width):
    half = width // 2
    windows = [[v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)] for i in range(len(values))]
    expected = [math.fsum(window) / len(window) if window else math.nan for window in windows]
    np.testing.assert_allclose(moving_mean(np.array(values), width), expected, rtol=1e-9, atol=1e-9 * 1e3)
    assert sampled(10, 4).tolist() == [0, 3, 6, 9]
    assert sampled(1, 4).tolist() == [0]


def log_of(steps, causes=None, **columns):
    found = {name: np.array(values, np.float64) for name, values in columns.items()}
    return Steps(np.array(steps, np.int64), found, np.array(causes or [""] * len(steps), np.str_))


def test_each_step_of_either_is_there_once_with_the_columns_of_both():
    trace = log_of([3, 4, 5], ["", "LOSS", ""], loss=[3.0, 4.0, 5.0], critical_low=[8.0, 8.0, 8.0])
    log = log_of([1, 4, 9], ["", "", "OVERFLOW"], loss=[1.0, 4.0, 9.0], retries=[0.0, 1.0, 0.0])
    both = joined(trace, log)
    assert both.step.tolist() == [1, 3, 4, 5, 9]
    assert both.cause.tolist() == ["", "", "LOSS", "", "OVERFLOW"]
    np.testing.assert_array_equal(both.columns["loss"], [1.0, 3.0, 4.0, 5.0, 9.0])
    np.testing.assert_array_equal(both.columns["critical_low"], [np.nan, 8.0, 8.0, 8.0, np.nan])
    np.testing.assert_array_equal(both.columns["retries"], [0.0, np.nan, 1.0, np.nan, 0.0])


def test_a_trace_of_another_run_is_left_out_and_named(tmp_path):
    """The same folder, used again without a trace: the log is new, and the trace is that of the first run."""
    folder = write_run(tmp_path / "twice")
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    lines = [{**line, "loss": 7.0, "applied": True, "cause": None} for line in lines[:4]]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(folder)
    assert (found.step.tolist(), found.skipped.any()) == ([1, 2, 3, 4], False)
    assert found.tensors is None
    assert any(
        "trace is of another run than the log, which has other numbers at step 1" in note for note in found.notes
    )


@pytest.mark.parametrize("more", [0, 5])
def test_of_a_step_in_both_the_number_of_the_trace_counts(more):
    """However long the log is, which has null for an infinite loss; what the trace does not say is the log's."""
    trace = log_of([1, 2, 3], ["", "LOSS", ""], loss=[np.inf, 2.0, np.nan])
    log = log_of(range(1, 4 + more), ["LOSS"] * (3 + more), loss=[np.nan, 7.0, 8.0] + [9.0] * more)
    both = joined(trace, log)
    np.testing.assert_array_equal(both.columns["loss"][:3], [np.inf, 2.0, 8.0])
    assert both.cause[:3].tolist() == ["LOSS"] * 3


def test_one_alone_is_itself():
    log = log_of([1, 2], loss=[1.0, 2.0])
    assert joined(None, log) is log
    assert joined(log, log_of([])) is log
    assert len(joined(None, None).step) == 0


def test_a_log_of_every_second_step_beside_a_short_trace(tmp_path):
    """The trace has fewer rows than the log, and skips that the log lacks."""
    whole = write_run(tmp_path / "whole", steps=60, skips=(7, 9, 44), trace=False)
    run = write_run(tmp_path / "run", steps=20, skips=(7, 9), log=False)
    lines = [line for line in (whole / "steps.jsonl").read_text().splitlines() if json.loads(line)["step"] % 2 == 0]
    (run / "steps.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(run)
    assert found.step.tolist() == [*range(1, 21), *range(22, 61, 2)]
    assert found.step[found.skipped].tolist() == [7, 9, 44]
    said = not_logged(digest(found).health)
    assert said.startswith("The record has only 40 of 60 steps, and nothing in the folder counts all skips")
