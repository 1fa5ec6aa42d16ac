"""The stateful face of loss scaling: scale, unscale, apply, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.checks import check_number
from scaler.errors import InvalidArgument
from scaler.masters import MasterWeights
from scaler.optimizers import Optimizer, build_optimizer, check_optimizer, update_variables
from scaler.pairs import check_pairs
from scaler.rollback import Snapshot
from scaler.strategies import Dynamic, Event, Strategy


class Outcome(NamedTuple):
    """What one attempted step did, as scalar tensors: nothing was read by the host.

    Attributes:
        finite: Bool, whether the step was applied; False when it was skipped.
        loss_scale: Float32, the scale this step was attempted with.
        grad_norm: Float32, the global norm of the unscaled gradients before clipping; not finite on a skipped step.
    """

    finite: tf.Tensor
    loss_scale: tf.Tensor
    grad_norm: tf.Tensor


class Counters(NamedTuple):
    """Steps since the scaler was made, as scalar int64 tensors.

    Attributes:
        attempted: Calls of `apply` or `update`: `applied + skipped`.
        applied: Those whose gradients were finite, so that the weights moved.
        skipped: Those that changed nothing.
        consecutive_skips: Skipped steps since the last applied one.
    """

    attempted: tf.Tensor
    applied: tf.Tensor
    skipped: tf.Tensor
    consecutive_skips: tf.Tensor


class LossScaler(tf.Module):
    """Scales losses, unscales gradients, applies or skips steps, and moves the scale by a strategy.

        loss_scaler = scaler.LossScaler(scaler.Dynamic())

        @tf.function
        def train_step(x, y):
            before = scaler.snapshot(model.non_trainable_variables)
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
                scaled = loss_scaler.scale(loss)
            grads = tape.gradient(scaled, model.trainable_variables)
            outcome = loss_scaler.apply(optimizer, grads, masters, clip_norm=1.0, rollback=before)

    It holds the strategy's state and the counters in variables, so `tf.train.Checkpoint(loss_scaler=loss_scaler)`
    saves all of it.

    Args:
        strategy: How the scale moves; `Dynamic()` if not given.

    Raises:
        InvalidArgument: For an object that is no strategy, or whose state has no scalar `loss_scale`.
    """

    def __init__(self, strategy: Strategy | None = None, name: str = "loss_scaler"):
        super().__init__(name=name)
        self.strategy: Strategy = Dynamic() if strategy is None else strategy
        _check_strategy(self.strategy)
        with tf.init_scope():
            state = self.strategy.init()
            _check_state(self.strategy, state)
            self._state_type = type(state)
            self._state = {field: _variable(value, field) for field, value in state._asdict().items()}
            counts = ("attempted", "applied", "consecutive_skips")
            self._counts = {field: _variable(tf.constant(0, tf.int64), field) for field in counts}

    @property
    def state(self) -> Any:
        """The strategy's state now, a NamedTuple of scalar tensors."""
        return self._state_type(**{field: tf.identity(variable) for field, variable in self._state.items()})

    @property
    def loss_scale(self) -> tf.Tensor:
        """The scale the next loss is multiplied by, scalar float32."""
        return tf.identity(self._state["loss_scale"])

    @property
    def counters(self) -> Counters:
        """What was attempted, applied and skipped so far."""
        attempted, applied, consecutive = (tf.identity(variable) for variable in self._counts.values())
        return Counters(attempted, applied, attempted - applied, consecutive)

    def scale(self, loss) -> tf.Tensor:
        """The loss times the loss scale, in float32 whatever its dtype, so that the product itself cannot overflow.

        A 16-bit loss still receives the scale as a 16-bit gradient: for float16 that limits the scale to 2^15. Compute
        the loss in float32.

        Args:
            loss: Scalar of a floating dtype.

        Raises:
            InvalidArgument: For another shape or dtype.
        """
        loss = tf.convert_to_tensor(loss)
        if not loss.dtype.is_floating:
            raise InvalidArgument(
                f"scale(loss): the loss has dtype {loss.dtype.name}: expected a floating-point scalar. Cast it first."
            )
        if loss.shape.rank not in (0, None):
            raise InvalidArgument(
                f"scale(loss): the loss has shape {loss.shape}: expected a scalar. Reduce it first, such as with "
                "tf.reduce_mean(loss)."
            )
        return tf.cast(tf.ensure_shape(loss, []), tf.float32) * self.loss_scale

    def unscale(self, grads: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
        """Gradients of the loss from gradients of the scaled loss, for a step written in the long form.

        Call it before `update`: the scale must be the one the loss was multiplied by.

        Args:
            grads: Tensors of any floating dtype, `tf.IndexedSlices` or None.

        Returns:
            The same structure in float32, with duplicate indices summed.
        """
        return gradients.unscale(grads, self.loss_scale)

    def apply(
        self,
        optimizer: Optimizer,
        grads: Sequence[gradients.Gradient],
        variables: Sequence | MasterWeights,
        *,
        clip_norm: float | tf.Tensor | None = None,
        rollback: Snapshot | None = None,
        allow_16bit_updates: bool = False,
    ) -> Outcome:
        """Applies the step if all unscaled gradients and their squared global norm are finite, else skips it.

        Applied: unscale, clip, update the float32 weights, round masters into the model; elements of `rollback` that
        are not finite any more are put back. Skipped: variables, slots, `optimizer.iterations` and masters keep every
        bit, and all of `rollback` is put back. Either way the strategy moves the scale and the counters count,
        afterwards.

        Args:
            optimizer: A Keras optimizer, or any function `(grads, variables) -> None`. It is called with the unscaled
                float32 gradients that are not None.
            grads: Gradients of the *scaled* loss, one for each variable: tensors of a floating dtype,
                `tf.IndexedSlices` or None.
            variables: The variables the gradients belong to, or a `MasterWeights` over them.
            clip_norm: Largest global norm of the unscaled gradients, or None for no clipping.
            rollback: `snapshot(model.non_trainable_variables)` taken before the forward pass: put back on a skip, so
                that BatchNorm's statistics never hold a value of a step that did not happen.
            allow_16bit_updates: Let the optimizer work on 16-bit variables. It makes infinities by itself (Adam's
                epsilon and second moments underflow in float16), so the promise does not cover it.

        Returns:
            What happened, as tensors.

        Raises:
            InvalidArgument: For lists that do not match, no gradient at all, a wrong dtype or shape, 16-bit variables
                without masters, or an optimizer that scales by itself.
        """
        check_optimizer(optimizer)
        masters = variables if isinstance(variables, MasterWeights) else None
        grads = list(grads)
        targets = masters.weights if masters else list(variables)
        check_pairs(grads, targets, allow_16bit_updates)
        if clip_norm is not None:
            check_number("clip_norm", clip_norm, "a positive finite number or None", lambda v: 0 < v < math.inf)
        build_optimizer(optimizer, targets)

        loss_scale = self.loss_scale
        present = [(grad, target) for grad, target in zip(grads, targets, strict=True) if grad is not None]
        unscaled = gradients.unscale([grad for grad, _ in present], loss_scale)
        squared_norm = gradients.squared_norm(unscaled)
        norm = tf.sqrt(squared_norm)
        finite = tf.math.is_finite(squared_norm)

        def applied() -> None:
            clipped = unscaled if clip_norm is None else gradients.clip_by_norm(unscaled, norm, clip_norm)
            if masters:
                masters.refresh()
            update_variables(optimizer, clipped, [target for _, target in present])
            if masters:
                masters.write()
            if rollback is not None:
                rollback.restore_nonfinite()

        def skipped() -> None:
            if rollback is not None:
                rollback.restore()

        tf.cond(finite, applied, skipped)
        self.update(Event(finite))
        return Outcome(finite, loss_scale, norm)

    def update(self, event: Event) -> None:
        """Moves the scale by the strategy and counts the step: the end of a step written in the long form.

        Args:
            event: What the step showed, such as `Event(finite=all_finite(unscaled))`.
        """
        state = self.strategy.update(self.state, event)
        for field, variable in self._state.items():
            variable.assign(getattr(state, field))
        counts, applied = self._counts, tf.cast(event.finite, tf.int64)
        counts["attempted"].assign_add(1)
        counts["applied"].assign_add(applied)
        counts["consecutive_skips"].assign((counts["consecutive_skips"] + 1) * (1 - applied))


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
    return tf.Variable(value, trainable=False, name=name)


def _check_strategy(strategy: object) -> None:
    if isinstance(strategy, type) or not isinstance(strategy, Strategy):
        raise InvalidArgument(
            f"LossScaler({strategy!r}): expected a strategy such as scaler.Dynamic(), scaler.Static(1024.0) or "
            "scaler.NoScaling(), an object with init() and update(state, event)."
        )


def _check_state(strategy: Strategy, state: object) -> None:
    if not hasattr(state, "_asdict") or getattr(state, "loss_scale", None) is None:
        raise InvalidArgument(
            f"{type(strategy).__name__}.init() returned {state!r}: expected a NamedTuple of tensors with a field "
            "named loss_scale."
        )
