"""The stateful face of loss scaling: scale, unscale, apply, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler import gradients, replicas
from scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, as_float, check_flag, within
from scaler.clipping import ClipByNorm, ClipByValue, Clipping, clipping_of
from scaler.errors import InvalidArgument
from scaler.gate import Gate
from scaler.graphs import apart, as_called, as_written
from scaler.masters import MasterWeights
from scaler.optimizers import Optimizer, check_optimizer
from scaler.outcome import Cause, Outcome, Skip, explain
from scaler.pairs import as_gradient, check_pairs
from scaler.rollback import Snapshot
from scaler.strategies import Dynamic, Event, Strategy
from scaler.strategies.base import check_event, check_state, check_strategy, needs_of
from scaler.stuck import Reading, StuckPolicy, Watch
from scaler.variables import explain_other_shapes, shared_variable


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
        stuck: What `check` finds wrong, and what it does then; `StuckPolicy()` if not given.
        sum_duplicates: Whether duplicate indices of a `tf.IndexedSlices`, as an Embedding's repeated ids make them, are
            summed before the optimizer sees them, so that it moves as with the dense gradient. False gives it the
            slices as they are, and repeats what Keras does alone: Adam and others then square each by itself. What is
            decided and measured is of the sum either way.

    Raises:
        InvalidArgument: For an object that is no strategy, or whose state has no scalar `loss_scale`.
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        stuck: StuckPolicy | None = None,
        sum_duplicates: bool = True,
        name: str = "loss_scaler",
    ):
        super().__init__(name=name)
        check_flag("sum_duplicates", sum_duplicates)
        self.sum_duplicates = sum_duplicates
        self.strategy: Strategy = Dynamic() if strategy is None else strategy
        check_strategy(self.strategy)
        with tf.init_scope():
            state = self.strategy.init()
            check_state(self.strategy, state)
            self._state_type = type(state)
            self._state = {field: shared_variable(value, field) for field, value in state._asdict().items()}
            for field, variable in self._state.items():
                explain_other_shapes(variable, f"{type(self.strategy).__name__}'s {field}")
            counts = ("attempted", "applied", "consecutive_skips")
            self._counts = {field: shared_variable(tf.constant(0, tf.int64), field) for field in counts}
            self._last_skip = {field: shared_variable(value, field) for field, value in _NEVER_SKIPPED.items()}
            # The scale that the gradients of now carry, until the next `scale`: an `apply` may come after an `update`.
            self._scale_used = replicas.local_variable(0.0, "scale_used")
            # Whether the losses since the last decision were finite; one decision may be taken in several `apply`.
            self._loss_finite = replicas.local_variable(True, "loss_finite")
            self._decided = replicas.local_variable(False, "decided")
        self._names: list[str] = []
        if stuck is not None and not isinstance(stuck, StuckPolicy):
            raise InvalidArgument(f"LossScaler(stuck={stuck!r}): expected a scaler.StuckPolicy, or None.")
        self.stuck = StuckPolicy() if stuck is None else stuck

    @property
    def stuck(self) -> StuckPolicy:
        """What `check` finds wrong, and what it does then. A new policy starts with a new history."""
        return self._watch.policy

    @stuck.setter
    def stuck(self, policy: StuckPolicy) -> None:
        self._watch = Watch(policy)

    @property
    def state(self) -> Any:
        """The strategy's state now, a NamedTuple of scalar tensors."""
        fields = {field: tf.identity(variable) for field, variable in self._state.items()}
        return self._state_type(**{**fields, "loss_scale": self._in_bounds(fields["loss_scale"])})

    @property
    def loss_scale(self) -> tf.Tensor:
        """The scale the next loss is multiplied by, scalar float32.

        A value outside the strategy's bounds, which only a damaged or foreign checkpoint can bring, counts as the
        nearest bound; a NaN counts as the strategy's initial scale.
        """
        return self._in_bounds(tf.identity(self._state["loss_scale"]))

    def _in_bounds(self, stored: tf.Tensor) -> tf.Tensor:
        known = tf.where(tf.math.is_nan(stored), self.strategy.init().loss_scale, stored)
        return within(known, *self._bounds())

    @property
    def counters(self) -> Counters:
        """What was attempted, applied and skipped so far."""
        attempted, applied, consecutive = (tf.identity(variable) for variable in self._counts.values())
        return Counters(attempted, applied, attempted - applied, consecutive)

    @as_written
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
        loss = tf.cast(tf.ensure_shape(loss, []), tf.float32)
        loss_scale = self.loss_scale
        self._scale_used.assign(loss_scale)
        earlier = tf.logical_or(self._decided, self._loss_finite)
        self._loss_finite.assign(tf.logical_and(earlier, tf.math.is_finite(loss)))
        self._decided.assign(False)
        return loss * loss_scale

    @as_written
    def unscale(self, grads: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
        """Gradients of the loss from gradients of the scaled loss, for a step written in the long form.

        They are divided by the scale that the last `scale` multiplied by, also after an `update`.

        Args:
            grads: Tensors of any floating dtype, `tf.IndexedSlices` or None.

        Returns:
            The same structure in float32, with duplicate indices summed, unless `sum_duplicates` is False.
        """
        unscale = gradients.unscale if self.sum_duplicates else gradients.divide
        return unscale(grads, self._scale_of_gradients())

    @as_written
    def apply(
        self,
        optimizer: Optimizer,
        grads: Sequence[gradients.Gradient],
        variables: Sequence | MasterWeights,
        *,
        clip_norm: float | tf.Tensor | None = None,
        clip: ClipByNorm | ClipByValue | None = None,
        rollback: Snapshot | None = None,
        allow_16bit_updates: bool = False,
        diagnose: Callable[[tf.Tensor], Sequence[gradients.Gradient]] | None = None,
        update: bool = True,
        when: bool | tf.Tensor = True,
        unscaled: bool | tf.Tensor = False,
    ) -> Outcome:
        """Applies the step if all unscaled gradients and their squared global norm are finite, else skips it.

        Applied: unscale, clip, update the float32 weights, round masters into the model; elements of `rollback` that
        are not finite any more are put back. Skipped: variables, slots, `optimizer.iterations` and masters keep every
        bit, and all of `rollback` is put back. Either way the strategy moves the scale and the counters count,
        afterwards.

        Under a `tf.distribute` strategy it is called inside `strategy.run`, with each replica's gradients. They are
        summed over the replicas in float32 first; the decision, the norm and the clipping are of the sum. So divide
        the loss by the size of the *global* batch.

        Args:
            optimizer: A Keras optimizer, or any function `(grads, variables) -> None`. It is called with the unscaled
                float32 gradients that are not None. On several replicas each calls a function with the same, summed
                gradients; variables of its own must be made in the strategy's scope, as all others.
            grads: Gradients of the *scaled* loss, one for each variable: tensors of a floating dtype,
                `tf.IndexedSlices` or None.
            variables: The variables the gradients belong to, or a `MasterWeights` over them.
            clip_norm: Largest global norm of the unscaled gradients, or None for no clipping by it.
            clip: Another way to clip them, in its place: `ClipByNorm(1.0)`, each by itself, or `ClipByValue(1.0)`.
            rollback: `snapshot(model.non_trainable_variables)` taken before the forward pass: put back on a skip, so
                that BatchNorm's statistics never hold a value of a step that did not happen.
            allow_16bit_updates: Let the optimizer work on 16-bit variables. It makes infinities by itself (Adam's
                epsilon and second moments underflow in float16), so the promise does not cover it.
            diagnose: Called on a skip alone, with a scalar, it gives the gradients for that output gradient, as
                `lambda small: tape.gradient(scaled, weights, output_gradients=small)` does with a persistent tape. If
                they are not finite even at a loss scale of 2^-14, `outcome.cause` is BACKWARD and not OVERFLOW. Each
                replica calls it by itself, so that replicas cannot meet in it, as in the gradient of a BatchNorm that
                synchronises its statistics.
            update: False leaves the scale and the counters to one `update` for several `apply`: with several
                optimizers, `update(Event(a.finite & b.finite))`.
            when: Scalar bool, the same on all replicas. False does nothing, and leaves an outcome that was not applied
                with norms of NaN and no cause: for accumulation.
            unscaled: Scalar bool, the same on all replicas: whether the gradients went through `unscale` already. A
                strategy that needs histograms sees them as they are.

        Returns:
            What happened, as tensors.

        Raises:
            InvalidArgument: For lists that do not match, no gradient at all, a wrong dtype or shape, 16-bit variables
                without masters, or an optimizer that scales by itself.
        """
        clipping = self.check_arguments(optimizer, clip_norm=clip_norm, clip=clip)
        if rollback is not None and not isinstance(rollback, Snapshot):
            raise InvalidArgument(
                f"apply(rollback={type(rollback).__name__}): expected scaler.snapshot(model.non_trainable_variables), "
                "taken before the forward pass, or None."
            )
        masters = variables if isinstance(variables, MasterWeights) else None
        grads = [grad if grad is None else as_gradient(grad) for grad in grads]
        targets = masters.weights if masters else list(variables)
        check_pairs(grads, targets, allow_16bit_updates)
        self._names = [getattr(target, "path", target.name) for target in targets]

        positions = [position for position, grad in enumerate(grads) if grad is not None]
        gate = Gate(optimizer, targets, positions, masters, clipping, needs_of(self.strategy), self.sum_duplicates)
        loss_scale, loss_finite = self._scale_of_gradients(), tf.identity(self._loss_finite)
        decision = gate.decide(
            [grads[i] for i in positions],
            loss_scale if unscaled is False else tf.where(unscaled, 1.0, loss_scale),
            loss_finite,
            rollback,
            tf.convert_to_tensor(when),
            lambda skip: self._keep(loss_scale, skip),
            self._update if update else (lambda event, done: None),
        )
        attempted = tf.get_static_value(decision.attempted)
        self._decided.assign(True if attempted else tf.logical_or(self._decided, decision.attempted))
        skip = decision.skip if diagnose is None else self._told_apart(decision.skip, loss_scale, diagnose)
        return Outcome(
            finite=decision.finite,
            loss_scale=loss_scale,
            grad_norm=decision.norm,
            cause=skip.cause,
            has_nan=skip.has_nan,
            index=skip.index,
            clipped_norm=decision.clipped_norm,
        )

    @staticmethod
    def check_arguments(
        optimizer: Optimizer,
        *,
        clip_norm: float | tf.Tensor | None = None,
        clip: ClipByNorm | ClipByValue | None = None,
    ) -> Clipping | None:
        """Refuses what `apply` would refuse at the first step, and returns the clipping that is asked for.

        Raises:
            InvalidArgument: For an optimizer that is none or scales by itself, or a clipping that cannot work.
        """
        check_optimizer(optimizer)
        return clipping_of(clip_norm, clip)

    @as_written
    def update(self, event: Event) -> None:
        """Moves the scale by the strategy and counts the step: the end of a step written in the long form.

        Args:
            event: What the step showed, such as `Event(finite=all_finite(unscaled))`.

        Raises:
            InvalidArgument: For what is no `Event`, or a part of one with another shape or dtype than `Event` names.
        """
        if not isinstance(event, Event):
            raise InvalidArgument(f"update({event!r}): expected scaler.Event(finite=...), around a scalar bool tensor.")
        check_event(self.strategy, event)
        if tf.distribute.in_cross_replica_context():
            self._update(event)
        else:
            replicas.merge(lambda strategy, event: self._update(_of_first(strategy, event)), event)

    def _update(self, event: Event, done: tf.Tensor | None = None) -> None:
        state = as_called(self.strategy.update)(self.state, event)
        counts, applied = self._counts, tf.cast(event.finite, tf.int64)
        skips = (counts["consecutive_skips"] + 1) * (1 - applied)
        # Nothing here depends on it by itself: a step that breaks off is not to be counted.
        with tf.control_dependencies([] if done is None else [done]):
            for field, variable in self._state.items():
                variable.assign(getattr(state, field))
            counts["attempted"].assign_add(1)
            counts["applied"].assign_add(applied)
            counts["consecutive_skips"].assign(skips)

    @property
    def last_skip(self) -> Outcome:
        """The outcome of the last skipped step, without norms; its cause is `Cause.NONE` if none was skipped yet."""
        fields = {field: tf.identity(variable) for field, variable in self._last_skip.items()}
        nan = tf.constant(float("nan"))
        return Outcome(finite=tf.equal(fields["cause"], Cause.NONE), grad_norm=nan, clipped_norm=nan, **fields)

    def explain(self, outcome: Outcome | None = None) -> str:
        """One sentence on what a step did, with the name of the variable. It reads the outcome: call it on the host.

        Args:
            outcome: From the `apply` that was traced last, whose variables' names are used; the last skip if not given.
        """
        return explain(self.last_skip if outcome is None else outcome, self._names)

    def check(self) -> None:
        """Raises, warns or does nothing, as the `stuck` policy says, if the scaler makes no progress.

        Call it on the host, every now and then: it reads four numbers. A `loops.Loop` calls it at each visit.

        Raises:
            StuckError: With the reason of the last skip, if the policy is to raise.
            InvalidArgument: Inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise InvalidArgument("check() reads numbers on the host: call it outside of the tf.function.")
        counts = {name: int(variable.numpy()) for name, variable in self._counts.items()}
        reading = Reading(
            attempted=counts["attempted"],
            skipped=counts["attempted"] - counts["applied"],
            consecutive_skips=counts["consecutive_skips"],
            loss_scale=float(self.loss_scale),
        )
        low, high = (float(bound) for bound in self._bounds())
        self._watch.look(reading, low, high, lambda: self.explain() if int(self.last_skip.cause) else "")

    def _told_apart(self, skip: Skip, loss_scale: tf.Tensor, diagnose: Callable) -> Skip:
        """The reason of a skip, after a look at the gradients at a low scale where an overflow is presumed."""
        presumed = tf.equal(skip.cause, Cause.OVERFLOW)

        def broken() -> tf.Tensor:
            small = tf.minimum(self._bounds()[0], _LOW_SCALE) / loss_scale
            return tf.logical_not(gradients.all_finite(as_called(diagnose)(small)))

        def correct(strategy, broken) -> tf.Tensor:
            backward = replicas.any_of(strategy, broken)
            last = self._last_skip["cause"]
            last.assign(tf.where(backward, Cause.BACKWARD, last))
            return tf.where(backward, Cause.BACKWARD, skip.cause)

        return skip._replace(cause=replicas.merge(correct, tf.cond(presumed, lambda: apart(broken), lambda: False)))

    def _keep(self, loss_scale: tf.Tensor, skip: Skip) -> None:
        for field, value in {"loss_scale": loss_scale, **skip._asdict()}.items():
            self._last_skip[field].assign(value)

    def remember_skip(self, outcome: Outcome, skipped: tf.Tensor) -> None:
        """Keeps what `last_skip` and `explain` tell, where `skipped`; `apply` does it by itself."""
        for field, variable in self._last_skip.items():
            variable.assign(tf.where(skipped, getattr(outcome, field), variable))

    def _scale_of_gradients(self) -> tf.Tensor:
        used = tf.identity(self._scale_used)
        return tf.where(used > 0.0, used, self.loss_scale)

    def _bounds(self) -> tuple[tf.Tensor, tf.Tensor]:
        low = getattr(self.strategy, "min_scale", SMALLEST_SCALE)
        high = getattr(self.strategy, "max_scale", LARGEST_SCALE)
        return as_float(low), as_float(high)


_LOW_SCALE = 2.0**-14
"""Where float16's backward pass can hardly overflow any more, and is not flushed to zero yet."""
_NEVER_SKIPPED = {"loss_scale": 0.0, "cause": int(Cause.NONE), "has_nan": False, "index": -1}


def _of_first(strategy, event: Event) -> Event:
    return Event(*(replicas.of_each(strategy, value)[0] for value in event))
