"""Several losses for the same weights, each with its own loss scale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.autograph import no_autograph
from scaler.errors import InvalidArgument
from scaler.gate.loss_scaler import LossScaler
from scaler.gate.optimizers import Optimizer, move_nothing
from scaler.gate.rollback import Snapshot, snapshot
from scaler.gate.state import Counters
from scaler.gradients.lists import as_list, check_gradients
from scaler.misuse.verdicts import refuse_exchanged
from scaler.outcome.outcome import Cause, Outcome, Skip, int64
from scaler.outcome.stuck import StuckPolicy
from scaler.strategies import NoScaling, Strategy
from scaler.strategies.base import require_inner
from scaler.weights.masters import MasterWeights


class PerLoss(tf.Module):
    """A loss scale and a strategy for each loss, and one decision for the step.

        losses = scaler.PerLoss({"task": scaler.Dynamic(), "penalty": scaler.Dynamic(2.0**30)})

        with tf.GradientTape(persistent=True) as tape:
            scaled = losses.scale({"task": task_loss, "penalty": penalty})
        grads = {name: tape.gradient(loss, weights) for name, loss in scaled.items()}
        outcome = losses.apply(optimizer, grads, weights)

    The order of a step:

        each loss's gradients, in float32, are divided by its own scale; they are added up
        the sum and its squared global norm are finite:  clip -> optimizer, as in `LossScaler.apply`
                                             otherwise:  nothing moves
        each loss's strategy sees whether its *own* gradients were finite, with its own statistics

    If one of two losses overflows, only its own scale backs off. For the other loss the skipped step still counts
    towards growth. On several replicas each loss's gradients are first summed over all replicas.

    `losses["task"]` is the `LossScaler` of a loss, with its `loss_scale`, `counters` and `explain()`.
    `tf.train.Checkpoint(losses=losses)` saves them all.

    Args:
        strategies: A strategy for each loss, by name. The name is also a key in checkpoints.
        stuck: When `check` considers a loss or the step stuck, and what it does then. Default: `StuckPolicy()`.

    Raises:
        InvalidArgument: If there is no loss, a name is not a string, or a value is not a strategy.

    References:
        NVIDIA/apex, apex/amp: `initialize(num_losses=...)` and `scale_loss(loss_id=...)` do the same for the losses of
        one optimizer.
    """

    def __init__(self, strategies: Mapping[str, Strategy], *, stuck: StuckPolicy | None = None, name: str = "per_loss"):
        super().__init__(name=name)
        if not isinstance(strategies, Mapping) or not strategies or not all(isinstance(n, str) for n in strategies):
            raise InvalidArgument(
                f"PerLoss({strategies!r}): expected a dict of strategies by the names of their losses, such as "
                '{"task": hs.Dynamic(), "penalty": hs.Dynamic()}.'
            )
        self._gate = _StepScaler(NoScaling(), stuck=stuck, name="step")
        self._gate._called = f"PerLoss, which decides about its losses {', '.join(map(repr, strategies))} together,"
        self._scalers: dict[str, LossScaler] = {}
        for loss, strategy in strategies.items():
            # Names of variables tell a resumed run which loss they are of.
            with _named("PerLoss", loss), tf.init_scope(), tf.name_scope(loss):
                own = self._scalers[loss] = LossScaler(strategy, stuck=stuck)
                require_inner(strategy, "PerLoss")
            own._called = f"Loss {loss!r}: The loss scaler"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the losses, in the order of `strategies`."""
        return tuple(self._scalers)

    def __getitem__(self, loss: str) -> LossScaler:
        """Returns the scaler of one loss. Its counters count the loss's own gradients.

        Raises:
            InvalidArgument: If there is no loss of this name.
        """
        if loss not in self._scalers:
            raise InvalidArgument(f"PerLoss: no loss is named {loss!r}: expected one of {', '.join(self.names)}.")
        return self._scalers[loss]

    @property
    def counters(self) -> Counters:
        """The steps attempted, applied and skipped so far, whichever loss caused a skip."""
        return self._gate.counters

    @no_autograph
    def scale(self, losses: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Multiplies each loss by its own scale, in float32. Call it inside the tape.

        Args:
            losses: Scalars of floating dtypes, by name, one for each loss.

        Raises:
            InvalidArgument: If the names differ, or `LossScaler.scale` refuses a loss.
        """
        self._check_names("scale", losses)
        scaled = {}
        for loss, own in self._scalers.items():
            with _named("scale", loss):
                scaled[loss] = own.scale(losses[loss])
        return scaled

    @no_autograph
    def apply(
        self,
        optimizer: Optimizer,
        grads: Mapping[str, Sequence[gradients.Gradient]],
        variables: Sequence | MasterWeights,
        *,
        clip_norm: float | tf.Tensor | None = None,
        rollback: Snapshot | None = None,
    ) -> Outcome:
        """Applies the sum of all losses' unscaled gradients if it is finite, else skips the step.

        Args:
            optimizer: As for `LossScaler.apply`.
            grads: For each loss the gradients of its *scaled* value, one for each variable, or None where the loss
                does not depend on the variable.
            variables: The variables the gradients belong to, or a `MasterWeights` over them.
            clip_norm: Largest global norm of the sum, or None for no clipping.
            rollback: As for `LossScaler.apply`.

        Returns:
            What happened to the step. Its `loss_scale` is the largest of all losses if the step was applied. After a
            skip `loss_scale`, `cause` and its details describe the first loss with non-finite gradients. If only the
            sum of the gradients was non-finite, the scale is 1.

        Raises:
            InvalidArgument: If the names differ, or `LossScaler.apply` refuses an argument.
        """
        self._check_names("apply", grads)
        # Masters must not be rounded into the model once per loss.
        targets = variables.weights if isinstance(variables, MasterWeights) else list(variables)
        scales: list[tf.Tensor] = []
        unscaled, owners = {}, {loss: own._calls for loss, own in self._scalers.items()}
        for loss, own in self._scalers.items():
            with _named("apply", loss):
                given = as_list("apply", grads[loss])
                check_gradients(given, targets)
            refuse_exchanged(loss, given, owners)
            scales.append(own._calls.carried("apply", given, targets).loss_scale)
            unscaled[loss] = [
                grad if gradients.overwrites(target) else divided
                for grad, target, divided in zip(given, targets, gradients.unscale(given, scales[-1]), strict=True)
            ]
        total = [
            _largest(parts) if gradients.overwrites(target) else _sum(parts)
            for target, *parts in zip(targets, *unscaled.values(), strict=True)
        ]
        step = self._gate.apply(optimizer, total, variables, clip_norm=clip_norm, rollback=rollback)
        outcomes = []
        # A step that fails in the update must not be counted.
        with tf.control_dependencies([step.cause]):
            for loss, own in self._scalers.items():
                with _named("apply", loss):
                    outcomes.append(own.apply(move_nothing, grads[loss], targets, rollback=snapshot([])))
        # Of an applied step as well: a log in which the scale of a skip stood beside a 1 would show a scale that grew.
        largest = tf.where(step.finite, tf.reduce_max(scales), step.loss_scale)
        outcome = _blamed(step._replace(loss_scale=largest), outcomes)
        self._gate._kept.keep_where(tf.logical_not(outcome.finite), outcome)
        return outcome

    def explain(self, outcome: Outcome | None = None) -> str:
        """Explains in one sentence what a step did, with the name of the variable.

        It reads the outcome, so call it on the host. `losses["task"].explain()` explains the last skip of one loss.

        Args:
            outcome: From `apply`. Default: the last skip.
        """
        return self._gate.explain(outcome)

    def check(self) -> None:
        """Raises, warns or does nothing if a loss or the step makes no progress: the `stuck` policy decides.

        Raises:
            StuckError: If the policy raises. The error names the loss.
            InvalidArgument: Inside a `tf.function`.
        """
        for own in self._scalers.values():
            own.check()
        self._gate.check()

    def _check_names(self, method: str, found: object) -> None:
        if not isinstance(found, Mapping) or set(found) != set(self._scalers):
            names = list(found) if isinstance(found, Mapping) else type(found).__name__
            raise InvalidArgument(
                f"{method}({names}): expected a dict with one entry for each of the losses {', '.join(self.names)}."
            )


class _StepScaler(LossScaler):
    """Decides for all losses together. After a skip it reports the scale of the loss that caused it."""

    def _pinned(self, loss_scale: float) -> str:
        del loss_scale
        return ""

    def _who(self) -> str:
        return self._called


def _blamed(step: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    """The step's outcome, with the details of the first loss whose own gradients were non-finite."""
    # If the gate reports an overflow at scale 1 and no loss does, the sum overflowed.
    skipped = tf.logical_not(step.finite)
    of_sum = tf.logical_and(skipped, tf.not_equal(step.cause, Cause.UPDATE))
    result = step._replace(cause=tf.where(of_sum, int64(Cause.TOO_LARGE), step.cause))
    for own in reversed(outcomes):
        guilty = tf.logical_and(skipped, tf.logical_not(own.finite))
        fields = ("loss_scale", *Skip._fields)
        result = result._replace(**{f: tf.where(guilty, getattr(own, f), getattr(result, f)) for f in fields})
    return result


def _sum(parts: Sequence[gradients.Gradient]) -> gradients.Gradient:
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    slices = [part for part in present if isinstance(part, tf.IndexedSlices)]
    if len(slices) < len(present):
        return tf.add_n([tf.convert_to_tensor(part) for part in present])
    # The gate sums equal indices before it decides.
    values, indices = (tf.concat([getattr(part, n) for part in slices], axis=0) for n in ("values", "indices"))
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


def _largest(parts: Sequence[gradients.Gradient]) -> gradients.Gradient:
    """Of gradients that are a variable's new values: each backward pass rounds with one scale, which must hold all."""
    present = [tf.convert_to_tensor(part) for part in gradients.widened(parts) if part is not None]
    return gradients.largest(tf.stack(present)) if present else None


@contextlib.contextmanager
def _named(method: str, loss: str) -> Iterator[None]:
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{method}, loss {loss!r}: {error}") from error
