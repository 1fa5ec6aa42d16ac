"""What a skipped step was skipped for, in words: from the numbers that a step returns."""

from __future__ import annotations

from typing import Any

from loops.loop.visit import Visit
from loops.record.columns import cause_names
from loops.step.train_step import TrainStep


def skip_names(visit: Visit, train_step: Any) -> dict[str, list[str | None]]:
    """The columns `cause` and `variable` of a visit as texts, None at each step that was not skipped.

    Args:
        visit: The steps.
        train_step: The loop's. The variables of a `TrainStep` alone are known; of another step there is no column.
    """
    if not isinstance(train_step, TrainStep):
        return {}
    paths = [variable.path for variable in train_step.model.trainable_variables]
    variables = [paths[value] if value >= 0 else None for value in visit.outputs["variable"].tolist()]
    return {"cause": cause_names(visit.outputs["cause"]), "variable": variables}
