"""What remedies need to know of a failed step: its layers, its loss, its optimizers, and what can change in each."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.steps import schedule as made_with
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.graph.changes import APART
from loops.diagnose.graph.models import optimizers_of
from loops.diagnose.graph.origin import Frame
from loops.step.train_step import TrainStep
from loops.support.batches import parts

_LARGE = 3e4
_FIRST_RATES = (0.1, 0.01, 0.001)
_FURTHER = 1e-3
_USUAL = 1e-3
"""A learning rate that is not larger is seldom too large."""
_RISEN = 10.0
Words = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step for which remedies are looked for.

    Attributes:
        attempts: The attempts at the step.
        path: The path of the layer where the failure began, or of the closest before it; None if there is none.
        singular: Whether the value is not finite in float32 either.
        order: The paths of the layers in the order of the forward pass.
        operation: The tensor where it began, or the forward tensor of that gradient; None if it cannot be the cause.
    """

    attempts: Attempts
    path: str | None = None
    singular: bool = False
    order: Sequence[str] = ()
    operation: Frame | None = None

    @functools.cached_property
    def inside(self) -> list[keras.layers.Layer]:
        """The layer of `path` and those in it."""
        return [] if self.path is None else scaler.observe.layers_of(self.attempts.layers[self.path])

    @functools.cached_property
    def following(self) -> list[keras.layers.Layer]:
        """The 16-bit layers from that one on, in the order of the forward pass, with the inner layers of the first."""
        if self.path not in self.order:
            return []
        layers, after = self.attempts.layers, self.order[self.order.index(self.path) :]
        return narrow_of(dict.fromkeys([*self.inside, *(layers[one] for one in after if one in layers)]))

    @functools.cached_property
    def narrow(self) -> list[keras.layers.Layer]:
        """All 16-bit layers."""
        return narrow_of(self.attempts.layers.values())

    @property
    def place(self) -> str:
        """Where the tensor is in which the failure began."""
        layer = None if self.operation is None else self.operation.layer
        return "the loss or the step" if layer is None else repr(layer)

    @property
    def begin(self) -> str:
        """The same at the beginning of a sentence."""
        return f"{self.place[0].upper()}{self.place[1:]}"

    @property
    def exponential_in(self) -> str | None:
        """If it is that of an exponential, the path of its layer, "" outside of the layers; else None."""
        if self.operation is None or self.operation.kind not in ("Exp", "Expm1", "Sinh", "Cosh"):
            return None
        return self.operation.layer if self.operation.layer in self.attempts.layers else ""

    @property
    def step(self) -> Any:
        """The train step if it is a `TrainStep`, whose loss and clipping can be changed; else None."""
        step = self.attempts.moment.train_step
        return step if isinstance(step, TrainStep) else None

    @property
    def gives_probabilities(self) -> bool:
        """Whether the outputs of the model of a `TrainStep` for the batch lie between 0 and 1."""
        if self.step is None:
            return False
        x, _, _ = parts(self.attempts.moment.batch)
        given = [np.asarray(tf.cast(one, tf.float32)) for one in tf.nest.flatten(self.step.model(x))]
        return all(((one >= 0.0) & (one <= 1.0)).all() for one in given)

    @property
    def own_names(self) -> str:
        """The names of the step's first own variables, such as sums that were never reset."""
        return ", ".join(one.name.split(":")[0] for one in self.attempts.own_variables[:3])

    @functools.cached_property
    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """The optimizers, that of the part that failed first, by how a part's own thing is told from another's."""
        found = optimizers_of(self.attempts.moment.train_step, self.attempts.part)
        return {f" of part {name!r}" if name else "": one for name, one in found.items()}

    @property
    def optimizer(self) -> Any:
        """The first of them, or None."""
        return next(iter(self.optimizers.values()), None)

    @property
    def whose(self) -> str:
        """How it is told from that of another part."""
        return next(iter(self.optimizers), "")

    @property
    def epsilon(self) -> float | None:
        """Its epsilon, or None."""
        epsilon = getattr(self.optimizer, "epsilon", None)
        return epsilon if isinstance(epsilon, float) else None

    @property
    def decay(self) -> float:
        """Its weight decay, or 0."""
        return getattr(self.optimizer, "weight_decay", None) or 0.0

    @property
    def rate(self) -> float | None:
        """Its learning rate now; None without an optimizer."""
        return None if self.optimizer is None else rate_of(self.optimizer)

    @functools.cached_property
    def risen_rate(self) -> tuple[float, float] | None:
        """The learning rate before the replayed steps, and that of the step, if it rose much.

        None if both are finite and the second is less than ten times the first, or if they are unknown.
        """
        now = self.rate
        with self.attempts.moment.at_checkpoint():
            before = self.rate
        if before is None or now is None or (math.isfinite(now) and not now >= _RISEN * before > 0.0):
            return None
        return before, now

    @property
    def rate_before(self) -> float:
        """The first of these if a schedule raised it, else NaN."""
        return self.risen_rate[0] if self.risen_rate and _is_scheduled(self.optimizer) else math.nan


def narrow_of(layers: Iterable[keras.layers.Layer]) -> list[keras.layers.Layer]:
    """Those that compute in 16 bits."""
    return [one for one in layers if one.compute_dtype in ("float16", "bfloat16")]


def unfit_numbers(case: Case) -> Iterator[Words]:
    """The numeric attributes of layers, such as epsilon, that become 0, 1 or infinity in their 16-bit dtype."""
    for owner in narrow_of(case.inside):
        for name, value in vars(owner).items():
            if name.startswith("_") or not isinstance(value, float) or not math.isfinite(value) or value in (0.0, 1.0):
                continue
            held = float(tf.cast(tf.constant(value, tf.float64), owner.compute_dtype))
            # A large negative number is a mask. The layer may need a large positive one as it is.
            if held in (0.0, 1.0) or (not math.isfinite(held) and value < 0):
                yield {"owner": owner, "number": name, "value": value, "fit": _fit(value)}


def _fit(value: float) -> float:
    if abs(value) > _LARGE:
        return math.copysign(_LARGE, value)
    return 1.0 - APART if value > 0.5 else math.copysign(APART, value)


def lower_rates(optimizers: Mapping[str, keras.optimizers.Optimizer]) -> Iterator[Words]:
    """Ever lower learning rates: a rate may be wrong by any factor.

    After a thousandth each further one is a thousandth of the one before, until the rate is one of those in use.
    """
    for whose, optimizer in optimizers.items():
        rate = rate_of(optimizer)
        factors = list(_FIRST_RATES)
        while math.isfinite(rate) and rate * factors[-1] > _USUAL:
            factors.append(factors[-1] * _FURTHER)
        for factor in factors:
            to = f", which is {rate * factor:g}" if math.isfinite(rate) and not _is_scheduled(optimizer) else ""
            yield {"lowered": optimizer, "of": whose, "factor": factor, "to": to}


def rate_of(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate now: that of its schedule at the step to come, if it has one."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _is_scheduled(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(made_with(optimizer), keras.optimizers.schedules.LearningRateSchedule)
