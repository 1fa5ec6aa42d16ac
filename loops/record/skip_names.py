"""What a skipped step was skipped for, in words: from the numbers that a step returns."""

from __future__ import annotations

from typing import Any

from loops.loop.visit import Visit
from loops.record.columns import cause_names
from loops.step.composed_step import ComposedStep
from loops.step.train_step import TrainStep


def skip_names(visit: Visit, train_step: Any) -> dict[str, list[str | None]]:
    """The columns `cause` and `variable` of a visit as texts, None at each step that was not skipped.

    Args:
        visit: The steps.
        train_step: The loop's. The variables of a `TrainStep` and of a `ComposedStep` are known, there with the name of
            the part; of another step there is no column.
    """
    if isinstance(train_step, ComposedStep):
        paths = list(train_step.weights)
    elif isinstance(train_step, TrainStep):
        paths = [variable.path for variable in train_step.model.trainable_variables]
    else:
        return {}
    variables = [paths[value] if value >= 0 else None for value in visit.outputs["variable"].tolist()]
    return {"cause": cause_names(visit.outputs["cause"]), "variable": variables}
