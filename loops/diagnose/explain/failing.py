"""Which step failed: the one that is asked about, or an earlier micro-batch of its window."""

from __future__ import annotations

from typing import Any

from loops.diagnose.explain.attempts import Attempt, Attempts


def failing(moment: Any, attempts: Attempts) -> tuple[int, Attempt]:
    """The failed step and its attempt: this step, or an earlier micro-batch that spoiled the window of this one."""
    attempt = attempts.as_run()
    if was_skipped(moment) and (attempt.applied or attempts.depends_on_graph(attempt)):
        # TensorFlow regroups products depending on the whole graph, and the graph of the run was another one.
        attempts.literal = True
        attempt = attempts.as_run()
        attempts.literal = not attempt.applied
    if attempts.windowed and attempt.applied and was_skipped(moment):
        for back, batch in enumerate(reversed(moment.before[1 - moment.train_step.accumulate :]), 1):
            earlier = attempts.as_run(batch)
            if not earlier.applied:
                moment.batch = batch
                return moment.step - back, earlier
    return moment.step, attempt


def was_skipped(moment: Any) -> bool:
    """Whether the run's log says that the step was skipped."""
    logged = moment.logged or {}
    return bool(logged.get("attempted", True)) and logged.get("applied") is False
