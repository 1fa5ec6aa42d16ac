"""A train step that takes the parts of a batch one by one, called as one that takes the batch."""

from __future__ import annotations

import inspect
from typing import Any

import scaler
from loops.loop.calls import TrainStepFunction


def taking_batches(train_step: TrainStepFunction, element_spec: Any) -> TrainStepFunction:
    """The step as a function of one batch.

    A step that needs one argument gets the batch. One that needs several, such as `step(x, y)`, gets the parts of a
    batch that is a tuple.

    Args:
        train_step: Any callable.
        element_spec: The dataset's.

    Raises:
        scaler.InvalidArgument: If it needs more arguments than a batch has parts, or fewer.
    """
    try:
        parameters = list(inspect.signature(train_step).parameters.values())
    except (TypeError, ValueError):
        return train_step
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in places if one.default is one.empty]
    by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    any_number = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if not by_name and len(needed) < 2 and (places or any_number):
        return train_step
    parts = len(element_spec) if isinstance(element_spec, tuple) else 1
    if not by_name and 2 <= len(needed) <= parts and (any_number or parts <= len(places)):

        def step(batch: Any) -> Any:
            return train_step(*batch)

        return step
    raise scaler.InvalidArgument(
        f"Loop(train_step): it needs the arguments ({', '.join([*needed, *by_name])}), but a batch of the dataset has "
        f"{parts} part{'s' * (parts != 1)}: expected a function of the batch, or one of as many arguments as a batch "
        "has parts, such as step(x, y) for pairs."
    )
