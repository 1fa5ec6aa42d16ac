"""Guards that a log and a trace are one run: no step, and no skip, that one of them has is left out."""

import json

import numpy as np
import pytest
from recorded_cases import write_run

from loops.record import read_run
from loops.record.skips import not_logged
from loops.record.steps import Steps, joined
from loops.record.summary import digest


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
