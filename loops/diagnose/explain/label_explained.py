"""The explanation of a step whose loss is NaN for a label that the model has no class for."""

from __future__ import annotations

import dataclasses
from typing import Any

from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.labels import Label, example_with
from loops.diagnose.explain.sentence import describe
from loops.diagnose.explain.shares import in_whole_batch
from loops.diagnose.graph.origin import Frame
from loops.diagnose.graph.scan import Scan


def of_refused_label(moment: Any, label: Label) -> Explanation:
    """The explanation of a step whose label this device refuses: XLA made a NaN of it in the run.

    Nothing else is known of the replay, nor needed: the label is in the batch, whatever the weights are.
    """
    logged = moment.logged or {}
    known = Explanation(
        step=moment.step,
        reproduced=True,
        differs=None,
        verdict="loss",
        where="data",
        kind="nan",
        loss_scale=logged.get("loss_scale"),
        attempted=bool(logged.get("attempted", True)),
        label=label,
        example=example_with(label.value, moment.batch),
    )
    return dataclasses.replace(known, sentence=describe(known))


def with_label(known: Explanation, moment: Any, seen: Scan, first: Frame, label: Label) -> Explanation:
    """The explanation if the loss is NaN for a label outside of the model's classes."""
    found = in_whole_batch(example_with(label.value, moment.batch), moment.batch, known.replicas, moment.replicas)
    return dataclasses.replace(
        known,
        where="data",
        tensor=first.name,
        operation=first.kind,
        line=seen.line(first.name),
        kind=first.problem,
        label=label,
        example=found,
    )
