"""Where the log has every tenth step and a trace has all, `explain` chooses its step from the trace."""

import pytest
from thinned_cases import STEPS, thinned_loop

import loops

pytestmark = pytest.mark.slow


def loop(folder, traced=True, every=10):
    trace = [loops.Trace(folder / "trace.arrow")] if traced else []
    return thinned_loop(folder, (13, 43), every=every, actions=trace)


@pytest.mark.exhaustive
def test_the_step_is_that_of_the_last_skip_in_the_trace(tmp_path):
    loop(tmp_path).run(STEPS)
    found = loops.observe.explain(loop(tmp_path))
    assert (found.step, found.verdict, found.where) == (43, "loss", "data")
    assert "The log" not in found.sentence


@pytest.mark.exhaustive
def test_a_trace_that_began_when_the_run_resumed_has_the_last_skip(tmp_path):
    """Also where the log has more steps: every second of 60, and the trace 20."""
    loop(tmp_path, traced=False, every=2).run(40)
    with pytest.warns(loops.ResumeWarning, match="the trace goes on with step 41"):
        loop(tmp_path, every=2).run(STEPS)
    found = loops.observe.explain(loop(tmp_path, every=2))
    assert (found.step, found.verdict, found.where) == (43, "loss", "data")
    assert "The record has only 40 of 60 steps; the run skipped 2 of 60, 1 of them not recorded." in found.sentence
    assert "add an hs.Trace" not in found.sentence


@pytest.mark.exhaustive
def test_a_trace_that_cannot_be_read_leaves_the_log(tmp_path):
    loop(tmp_path).run(STEPS)
    (tmp_path / "trace.arrow").write_bytes(b"no trace")
    found = loops.observe.explain(loop(tmp_path))
    assert (found.step, found.verdict) == (60, "unlogged")
    assert "the run skipped 2 of 60, none of them logged." in found.sentence
