"""What may help a step, and what it did when it was tried."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.explain.attempts import Attempts


class Kind(str, enum.Enum):
    """What a remedy changes. Whatever is decided of remedies is decided by their kinds, and never by their names."""

    LOSS_SCALE = "loss_scale"
    LAYER_IN_FLOAT32 = "layer_in_float32"
    FOLLOWING_IN_FLOAT32 = "following_in_float32"
    ALL_IN_FLOAT32 = "all_in_float32"
    LOSS_IN_FLOAT32 = "loss_in_float32"
    BFLOAT16 = "bfloat16"
    NUMBER_OF_A_LAYER = "number_of_a_layer"
    DENOMINATOR = "denominator"
    EXPONENT_CLIPPED = "exponent_clipped"
    PREDICTIONS_CLIPPED = "predictions_clipped"
    INPUTS_MOVED = "inputs_moved"
    PREDICTIONS_MOVED = "predictions_moved"
    DERIVATIVES_ZEROED = "derivatives_zeroed"
    """Makes a step pass and leaves the trouble where it is."""
    OWN_VARIABLES_CLEARED = "own_variables_cleared"
    ANOTHER_BATCH = "another_batch"
    LEARNING_RATE = "learning_rate"
    WEIGHT_DECAY = "weight_decay"
    EPSILON = "epsilon"
    CLIP_NORM = "clip_norm"


IN_PLACE = (Kind.LAYER_IN_FLOAT32, Kind.FOLLOWING_IN_FLOAT32)
"""More precision where the trouble began."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What was tried, and what the step did.

    Attributes:
        kind: What was changed.
        name: The same as a short phrase.
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
        layer: The path of the layer that was changed, or None.
        since_checkpoint: Whether all steps since the checkpoint were taken again with the change.
    """

    kind: Kind
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
    layer: str | None = None
    since_checkpoint: bool = False


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change that may help.

    Attributes:
        kind: As in `Remedy`.
        name: As in `Remedy`.
        advice: As in `Remedy`.
        change: Makes the context manager that makes it, or None where only the batch is another.
        batch: In the place of the step's own, or None.
        layer: As in `Remedy`.
    """

    kind: Kind
    name: str
    advice: str
    change: Callable[[], Any] | None = None
    batch: Any = None
    layer: str | None = None


def tried(attempts: Attempts, proposals: list[Proposal]) -> tuple[list[Remedy], dict[str, np.ndarray]]:
    """Each proposal with what the step did, and by name how many values of its gradients were not zero then."""
    remedies, counts = [], {}
    for proposal in proposals:
        try:
            attempt = attempts.take(proposal.change and proposal.change(), proposal.batch)
        except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion):
            # A layer may not work in another dtype, or a next batch may have another shape.
            done = Remedy(proposal.kind, proposal.name, False, False, math.nan, proposal.advice)
        else:
            done = Remedy(
                proposal.kind, proposal.name, True, attempt.finite, attempt.loss, proposal.advice, attempt.at_scale
            )
            if attempt.nonzero is not None:
                counts[proposal.name] = attempt.nonzero
        remedies.append(dataclasses.replace(done, layer=proposal.layer))
    return remedies, counts
