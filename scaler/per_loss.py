"""Several losses whose gradients meet in the same weights, each with a loss scale of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from scaler import gradients
from scaler.backend.autograph import as_written
from scaler.errors import InvalidArgument
from scaler.gate.optimizers import Optimizer, move_nothing
from scaler.gradients.pairs import check_gradients
from scaler.loss_scaler import Counters, LossScaler
from scaler.outcome import Cause, Outcome, Skip
from scaler.rollback import Snapshot, snapshot
from scaler.strategies import NoScaling, Strategy
from scaler.stuck import StuckPolicy
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

    So of two losses only the one whose gradients overflowed backs off, and a step that was skipped on account of
    another loss counts for its growth. On several replicas each loss's gradients count as summed over all of them.

    `losses["task"]` is the `LossScaler` of a loss, for its `loss_scale`, `counters` and `explain()`. All are saved with
    `tf.train.Checkpoint(losses=losses)`.

    Args:
        strategies: A strategy for each loss, by name. A name is also a key of checkpoints.
        stuck: What `check` finds wrong with a loss or with the steps; `StuckPolicy()` if not given.

    Raises:
        InvalidArgument: For no loss, a name that is no text, or an object that is no strategy.

    References:
        NVIDIA/apex, apex/amp, `initialize(num_losses=...)` and `scale_loss(loss_id=...)`, which do the same for losses
        of one optimizer.
    """

    def __init__(self, strategies: Mapping[str, Strategy], *, stuck: StuckPolicy | None = None, name: str = "per_loss"):
        super().__init__(name=name)
        if not isinstance(strategies, Mapping) or not strategies or not all(isinstance(n, str) for n in strategies):
            raise InvalidArgument(
                f"PerLoss({strategies!r}): expected a dict of strategies by the names of their losses, such as "
                '{"task": scaler.Dynamic(), "penalty": scaler.Dynamic()}.'
            )
        self._gate = _StepScaler(NoScaling(), stuck=stuck, name="step")
        self._scalers: dict[str, LossScaler] = {}
        for loss, strategy in strategies.items():
            with _named("PerLoss", loss):
                own = self._scalers[loss] = LossScaler(strategy, stuck=stuck)
            own._called = f"Loss {loss!r}: The loss scaler"

    @property
    def names(self) -> tuple[str, ...]:
        """The losses, in the order they were given in."""
        return tuple(self._scalers)

    def __getitem__(self, loss: str) -> LossScaler:
        """The scaler of one loss; its counters are those of the loss's own gradients.

        Raises:
            InvalidArgument: For a name that is none of the losses.
        """
        if loss not in self._scalers:
            raise InvalidArgument(f"PerLoss: {loss!r} is none of the losses {', '.join(self.names)}.")
        return self._scalers[loss]

    @property
    def counters(self) -> Counters:
        """What was attempted, applied and skipped so far: the steps, whichever loss was to blame."""
        return self._gate.counters

    @as_written
    def scale(self, losses: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Each loss times its own scale, in float32.

        Args:
            losses: Scalars of floating dtypes, by name, one for each loss. Call it inside of the tape.

        Raises:
            InvalidArgument: For other names, or a loss that `LossScaler.scale` refuses.
        """
        self._check_names("scale", losses)
        scaled = {}
        for loss, own in self._scalers.items():
            with _named("scale", loss):
                scaled[loss] = own.scale(losses[loss])
        return scaled

    @as_written
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
            grads: By loss, the gradients of its *scaled* value, one for each variable, or None for one that the loss
                does not depend on.
            variables: The variables the gradients belong to, or a `MasterWeights` over them.
            clip_norm: Largest global norm of the sum, or None for no clipping.
            rollback: As for `LossScaler.apply`.

        Returns:
            What happened to the step. Of a skipped one `loss_scale`, `cause` and all that belongs to it are those of
            the first loss whose gradients were not finite; if only their sum was not, the scale is 1.

        Raises:
            InvalidArgument: For other names, and whatever `LossScaler.apply` refuses.
        """
        self._check_names("apply", grads)
        # Masters are not to be rounded into the model for each loss.
        targets = variables.weights if isinstance(variables, MasterWeights) else list(variables)
        unscaled = {}
        for loss, own in self._scalers.items():
            with _named("apply", loss):
                check_gradients(grads[loss], targets)
            unscaled[loss] = gradients.unscale(grads[loss], own._scale_of(grads[loss])[0])
        total = [_sum(parts) for parts in zip(*unscaled.values(), strict=True)]
        step = self._gate.apply(optimizer, total, variables, clip_norm=clip_norm, rollback=rollback)
        outcomes = []
        # A step that breaks off in the update is not to be counted.
        with tf.control_dependencies([step.cause]):
            for loss, own in self._scalers.items():
                with _named("apply", loss):
                    outcomes.append(own.apply(move_nothing, grads[loss], targets, rollback=snapshot([])))
        outcome = _blamed(step, outcomes)
        self._gate.remember_skip(outcome, tf.logical_not(outcome.finite))
        return outcome

    def explain(self, outcome: Outcome | None = None) -> str:
        """One sentence on what a step did, with the name of the variable. It reads the outcome: call it on the host.

        Args:
            outcome: From `apply`; the last skip if not given. What a single loss last skipped for, its own scaler
                tells: `losses["task"].explain()`.
        """
        return self._gate.explain(outcome)

    def check(self) -> None:
        """Raises, warns or does nothing, as the `stuck` policy says, if a loss or the step makes no progress.

        Raises:
            StuckError: With the name of the loss.
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
    """Decides for all losses together. The scale that it tells of a skip is that of the loss to blame."""

    def _pinned(self, loss_scale: float) -> str:
        del loss_scale
        return ""


def _blamed(step: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    """The step's outcome with what the first loss says whose own gradients were not finite."""
    # What the gate calls an overflow at scale 1 without any loss's is an overflow of the sum.
    skipped = tf.logical_not(step.finite)
    of_sum = tf.logical_and(skipped, tf.not_equal(step.cause, Cause.UPDATE))
    result = step._replace(cause=tf.where(of_sum, int(Cause.TOO_LARGE), step.cause))
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
    # Equal indices are summed where the gradients are decided about.
    values, indices = (tf.concat([getattr(part, n) for part in slices], axis=0) for n in ("values", "indices"))
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


@contextlib.contextmanager
def _named(method: str, loss: str) -> Iterator[None]:
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{method}, loss {loss!r}: {error}") from error
