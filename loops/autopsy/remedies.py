"""What may help a step, and what it did when it was tried."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import scaler
from loops.autopsy.attempts import Attempts

ANOTHER_BATCH = "another batch"


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
    """

    name: str
    tried: bool
    finite: bool
    loss: float
    advice: str
    at_scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change that may help.

    Attributes:
        name: As in `Remedy`.
        advice: As in `Remedy`.
        change: Makes the context manager that makes it.
        batch: In the place of the step's own, or None.
    """

    name: str
    advice: str
    change: Callable[[], Any] = contextlib.nullcontext
    batch: Any = None


def tried(attempts: Attempts, proposals: list[Proposal]) -> list[Remedy]:
    """Each proposal with what the step did, those that help first."""
    remedies = []
    for proposal in proposals:
        try:
            attempt = attempts.take(proposal.change(), proposal.batch)
        except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion):
            # A layer may not work in another dtype, or a next batch may have another shape.
            remedies.append(Remedy(proposal.name, False, False, math.nan, proposal.advice))
        else:
            done = Remedy(proposal.name, True, attempt.finite, attempt.loss, proposal.advice, attempt.at_scale)
            remedies.append(done)
    return sorted(remedies, key=lambda remedy: not remedy.finite)
