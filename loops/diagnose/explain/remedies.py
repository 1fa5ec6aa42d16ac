"""What may help a step, and what it did when it was tried."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts

ANOTHER_BATCH = "another batch"


IN_FLOAT32 = "every layer in float32"


HIDES = "that are not finite set to zero"
"""In the name of what makes a step pass and leaves the trouble where it is."""


OWN = "the step's own variables set to zero"


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What was tried, and what the step did.

    Attributes:
        name: What was changed, as a short phrase.
        tried: Whether it was.
        finite: Whether its loss and gradients were finite then.
        loss: The step's loss then, NaN where it is not known.
        advice: What to write in one's program, as a sentence.
        at_scale: The lower loss scale that it needs beside, or None.
        gradients_left: The share of the gradients' values that are not zero then, of as many as any remedy leaves; None
            where it is not known, and of another batch.
        loss_ratio: The magnitude of the loss over the usual one: the median of the steps before that were applied, or
            the least that a remedy gives where there is none. None where it is not known.
        helps: Whether it is finite, and the step trains.
        why_not: Why it does not help although it is finite, or None.
    """

    name: str
    tried: bool
    finite: bool
    loss: float
    advice: str
    at_scale: float | None = None
    gradients_left: float | None = None
    loss_ratio: float | None = None
    helps: bool = False
    why_not: str | None = None


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change that may help.

    Attributes:
        name: As in `Remedy`.
        advice: As in `Remedy`.
        change: Makes the context manager that makes it, or None where only the batch is another.
        batch: In the place of the step's own, or None.
    """

    name: str
    advice: str
    change: Callable[[], Any] | None = None
    batch: Any = None


def tried(attempts: Attempts, proposals: list[Proposal]) -> tuple[list[Remedy], dict[str, np.ndarray]]:
    """Each proposal with what the step did, and by name how many values of its gradients were not zero then."""
    remedies, counts = [], {}
    for proposal in proposals:
        try:
            attempt = attempts.take(proposal.change and proposal.change(), proposal.batch)
        except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion):
            # A layer may not work in another dtype, or a next batch may have another shape.
            remedies.append(Remedy(proposal.name, False, False, math.nan, proposal.advice))
        else:
            done = Remedy(proposal.name, True, attempt.finite, attempt.loss, proposal.advice, attempt.at_scale)
            remedies.append(done)
            if attempt.nonzero is not None:
                counts[proposal.name] = attempt.nonzero
    return remedies, counts
