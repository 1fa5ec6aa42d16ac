"""A log of every tenth step: no reader takes its skips for those of the run."""

import numpy as np
import pytest
from recorded_cases import steps_of
from thinned_cases import STEPS, thinned_loop

import loops
from loops.record import read_run
from loops.record.skips import health, said_of, thinned
from loops.record.steps import Counted, Recorded
from loops.record.summary import digest, sentence
from loops.views.report.figures import scale_figure
from loops.views.report.tables import strategies_table
from loops.views.report.write import section
from loops.views.watch import LiveRun, line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinned") / "run"
    thinned_loop(folder, [13, 43, 44]).run(STEPS)
    return folder


def every(distance, last, skips=()):
    steps = range(distance, last + 1, distance)
    return list(steps), [step for step in steps if step in skips]


LOGS = [
    (every(10, 60), None),
    (every(10, 60), Counted(60, 0)),
    (every(10, 60), Counted(40, 0)),
    (every(10, 60), Counted(60, 3)),
    (every(2, 60, [8]), Counted(60, 3)),
    (every(3, 60, [9]), Counted(63, 1)),
    (every(11, 66), Counted(66, 1)),
    (every(21, 63), Counted(63, 1)),
    (([1, 2, 4], [2]), Counted(4, 1)),
    (every(10, 60, [50]), Counted(40, 1)),
]


def test_what_a_log_leaves_open(snapshot):
    found = [thinned(*log, counted) for log, counted in LOGS]
    assert [(one.unlogged, one.open, said_of(one)) for one in found] == snapshot


def test_where_a_trace_is_there_it_is_not_advised_to_add_one():
    found = thinned([2, 4, 5, 6], [5], Counted(6, 3), traced=True)
    assert said_of(found) == (
        "The record has only 4 of 6 steps; the run skipped 3 of 6, 2 of them not recorded. To learn why, log every "
        "step, or keep the hs.Trace from the first step on."
    )


@pytest.mark.parametrize("steps", [[], [1], [1, 2, 3], [0, 1, 2]])
def test_a_log_of_all_steps_leaves_nothing_open(steps):
    assert thinned(steps, [], Counted(3, 2)) is None
    assert not health(steps_of([{"step": step, "applied": True} for step in steps])).open


@pytest.mark.slow
def test_readers_name_the_skips_that_are_not_logged(run):
    recorded = read_run(run)
    assert recorded.counted == Counted(60, 3)
    found = digest(recorded)
    said = sentence(recorded, found)
    assert said.startswith("run: 6 logged steps, none skipped; ")
    assert said.endswith(
        "The log has only every 10th step; the run skipped 3 of 60, none of them logged. To learn why, log every step, "
        "or add an hs.Trace, which has all of them."
    )
    table = {row[0]: row[1] for row in strategies_table([recorded], [found]).rows}
    assert (table["steps"], table["skips"], table["skip rate"]) == ("60", "3", "5%")
    assert "The loss scale was 2^3 at each logged step. No logged step was skipped." in str(scale_figure(recorded, 600))
    course = LiveRun(run)
    course.look()
    assert "skipped 0 of 6 logged steps" in line(course)


@pytest.mark.slow
def test_without_a_checkpoint_nothing_is_said_of_the_other_steps(run, tmp_path):
    (tmp_path / "steps.jsonl").write_bytes((run / "steps.jsonl").read_bytes())
    recorded = read_run(tmp_path)
    found = digest(recorded)
    assert sentence(recorded, found).endswith(
        "nothing in the folder counts all skips: to know of all steps, log each of them."
    )
    table = {row[0]: row[1] for row in strategies_table([recorded], [found]).rows}
    assert {"skips", "skip rate"}.isdisjoint(table)


@pytest.mark.exhaustive
def test_explain_is_not_content_with_the_steps_that_are_logged(run):
    found = loops.observe.explain(thinned_loop(run, [13, 43, 44]))
    assert (found.step, found.verdict) == (60, "unlogged")
    assert found.sentence.startswith(
        "The log shows nothing wrong: none of the 6 steps in the log was skipped. The log has"
    )
    assert "the run skipped 3 of 60, none of them logged." in found.sentence


@pytest.mark.slow
def test_a_logged_skip_is_not_all_that_is_said(tmp_path):
    thinned_loop(tmp_path, [30, 43, 44]).run(STEPS)
    recorded = read_run(tmp_path)
    found = digest(recorded)
    assert "3 of 60, 2 of them not logged." in section(recorded, found, None).said


def test_steps_that_do_not_say_whether_they_were_applied_are_not_taken_for_applied():
    """As of a run whose step returned its decision only after it was resumed."""
    steps = np.arange(1, 41)
    columns = {
        "loss": np.where((steps > 2) & (steps < 12), np.nan, 1.0),
        "applied": np.where(steps <= 20, np.nan, 1.0),
    }
    run = Recorded(steps, columns, np.full(40, ""), name="run", counted=Counted(40, 9))
    found = digest(run)
    assert (found.health.unseen, found.health.moved, found.skips, found.attempts) == (0, 20, 0, 20)
    said = sentence(run, found)
    assert "none of the 20 with a known decision skipped" in said
    assert (
        "The log says of only 20 of 40 steps whether they were applied; the run skipped 9 of 40, none of them" in said
    )
