"""Remedies: changes that may help a step, and the result of trying them."""

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
from loops.diagnose.explain.learning_rates import FAR


class Kind(str, enum.Enum):
    """What a remedy changes. Decisions depend on this kind, never on a remedy's name."""

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
    """It makes a step pass without removing the cause."""
    OWN_VARIABLES_CLEARED = "own_variables_cleared"
    ANOTHER_BATCH = "another_batch"
    LEARNING_RATE = "learning_rate"
    WEIGHT_DECAY = "weight_decay"
    EPSILON = "epsilon"
    CLIP_NORM = "clip_norm"


IN_PLACE = (Kind.LAYER_IN_FLOAT32, Kind.FOLLOWING_IN_FLOAT32)
"""More precision where the failure began."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A remedy and the result of the step with it.

    Attributes:
        kind: What was changed.
        name: The change as a short phrase.
        tried: Whether the step could be run with it.
        finite: Whether loss and gradients were finite with it.
        loss: The loss of the step with it, or NaN if unknown.
        advice: What to change in the program, as a sentence.
        at_scale: The lower loss scale that it needs as well, or None.
        gradients_left: The number of non-zero gradient values with it, as a share of the most that any remedy leaves.
            None if unknown, and for another batch.
        loss_ratio: The magnitude of the loss over the usual one, which is the median of the earlier applied steps, or
            without any the smallest loss that a remedy gives. None if unknown.
        helps: Whether the step is finite with it, and trains.
        why_not: Why it does not help although the step is finite, or None.
        layer: The path of the layer that was changed, or None.
        since_checkpoint: Whether all steps since the checkpoint were replayed with the change.
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
        kind: What it changes.
        name: The change as a short phrase.
        advice: What to change in the program, as a sentence.
        change: A function that returns the context manager of the change; None if only the batch changes.
        batch: A batch to use instead of the step's own, or None.
        layer: The path of the layer that it changes, or None.
    """

    kind: Kind
    name: str
    advice: str
    change: Callable[[], Any] | None = None
    batch: Any = None
    layer: str | None = None


def try_proposals(attempts: Attempts, proposals: list[Proposal]) -> tuple[list[Remedy], dict[str, np.ndarray]]:
    """Tries each proposal, as long as there is time; of several learning rates none after the first that helps.

    Returns:
        The remedies, and by their names the number of non-zero values of each gradient.
    """
    remedies: list[Remedy] = []
    counts = {}
    for proposal in proposals:
        if proposal.kind is Kind.LEARNING_RATE and any(_is_rate_that_helps(one) for one in remedies):
            continue
        untried = Remedy(proposal.kind, proposal.name, False, False, math.nan, proposal.advice, layer=proposal.layer)
        if not attempts.in_time():
            remedies.append(untried)
            continue
        try:
            attempt = attempts.take(proposal.change and proposal.change(), proposal.batch)
        except (TypeError, ValueError, tf.errors.OpError, scaler.UnsupportedVersion):
            # A layer may not run in another dtype, or the next batch may have another shape.
            done = untried
        else:
            done = Remedy(
                proposal.kind, proposal.name, True, attempt.finite, attempt.loss, proposal.advice, attempt.at_scale
            )
            if attempt.finite and attempt.moved is not None and attempt.moved > FAR:
                done = dataclasses.replace(
                    done, why_not=f"its update is {attempt.moved:.2g} times as large as the weights"
                )
            if attempt.nonzero is not None:
                counts[proposal.name] = attempt.nonzero
        remedies.append(dataclasses.replace(done, layer=proposal.layer))
    return remedies, counts


def _is_rate_that_helps(remedy: Remedy) -> bool:
    return remedy.kind is Kind.LEARNING_RATE and remedy.finite and remedy.why_not is None
