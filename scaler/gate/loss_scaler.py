"""The stateful face of loss scaling: scale, unscale, apply, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import tape_records
from scaler.backend.packed import ByName
from scaler.checks import as_flag, as_loss, as_scale, as_variables, check_flag
from scaler.errors import InvalidArgument
from scaler.gate import optimizers
from scaler.gate.gate import Gate
from scaler.gate.judge import Spikes
from scaler.gate.retry import Again, cause_from_second_pass, cause_from_second_pass_on_replicas, first_gradients, retry
from scaler.gate.rollback import Snapshot
from scaler.gate.shares import Share, check_apply, check_arguments
from scaler.gate.state import Counters, StoredState
from scaler.gate.targets import Part, Targets
from scaler.gradients.clipping import ClipByNorm, ClipByValue
from scaler.gradients.lists import as_list, check_gradients, check_pairs
from scaler.misuse.calls import Calls
from scaler.misuse.carried import Carried
from scaler.misuse.marks import check_rescaled, marked_unscaled
from scaler.misuse.trace import not_judged
from scaler.outcome.outcome import Cause, LastSkip, Outcome, Skip, note_skip_in_trace, skip_in_trace
from scaler.outcome.skip_sentence import Names, Run, none_skipped, pinned
from scaler.outcome.stuck import Reading, StuckPolicy, Watch
from scaler.strategies import Dynamic, Event, Strategy
from scaler.strategies.base import (
    check_event,
    host_bounds_of,
    in_words,
    needs_of,
    require_strategy,
)
from scaler.weights.masters import MasterWeights
from scaler.weights.trainable import TrainableSet


class LossScaler(ByName):
    """Scales losses, unscales gradients, applies or skips steps, and adjusts the scale by a strategy.

        loss_scaler = scaler.LossScaler(scaler.Dynamic())

        @tf.function
        def train_step(x, y):
            before = scaler.snapshot(model.non_trainable_variables)
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
                scaled = loss_scaler.scale(loss)
            grads = tape.gradient(scaled, model.trainable_variables)
            outcome = loss_scaler.apply(optimizer, grads, masters, clip_norm=1.0, rollback=before)

    `tf.train.Checkpoint(loss_scaler=loss_scaler)` saves the strategy's state and the counters, which are variables.

    Args:
        strategy: How the scale moves. Default: `Dynamic()`.
        stuck: When `check` considers the scaler stuck, and what it does then. Default: `StuckPolicy()`.
        sum_duplicates: Whether duplicate indices of a `tf.IndexedSlices` are summed before the optimizer sees them. An
            Embedding makes such duplicates from repeated ids. The optimizer then moves as with the dense gradient.
            With False it receives the slices unchanged, as from Keras alone: Adam and others then square each slice by
            itself. The finite check and the norm use the sum either way.
        select: How a graph keeps a skipped step from moving anything. With True every new value is
            `where(finite, new, old)`, and nothing waits for the decision. With False the update stands in a branch, for
            which a GPU waits at each step, and a skip is looked at more closely: docs/concepts/skips.md has the table.
            Default: True on a GPU, and where XLA compiles the whole step, for optimizers of Keras that are proven to
            keep finite values finite. Else False, but that a small step selects its new values all the same, and only
            looks at a skip in a branch.
            Weights, slots and scales are the same either way, but for last bits where XLA compiles the whole step.

    Raises:
        InvalidArgument: If `strategy` is not a strategy, or its state has no scalar `loss_scale`. In `apply`, if
            `select=True` does not fit the optimizer.
    """

    _ENTRIES = ("_state", "_counts", "_before_retries", "_open_step", "_last_skip")
    _VARIABLES = "_all_variables"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        stuck: StuckPolicy | None = None,
        sum_duplicates: bool = True,
        select: bool | None = None,
        name: str = "loss_scaler",
    ):
        super().__init__(name=name)
        check_flag("sum_duplicates", sum_duplicates)
        if select is not None and not isinstance(select, bool):
            raise InvalidArgument(
                f"LossScaler(select={select!r} ({type(select).__name__})): expected True or False, or None, which "
                "selects on a GPU and under XLA, and branches elsewhere."
            )
        self.sum_duplicates, self.select = sum_duplicates, select
        self._strategy: Strategy = Dynamic() if strategy is None else strategy
        require_strategy(self._strategy)
        with tf.init_scope():
            self._stored, self._kept = StoredState(self.strategy), LastSkip()
            stored = self._stored
            self._calls = Calls(self.strategy, stored.floats.variable, stored.scale_now, stored.attempted)
            self._spikes = Spikes(self.strategy, stored)
        self._names = Names()
        if stuck is not None and not isinstance(stuck, StuckPolicy):
            raise InvalidArgument(f"LossScaler(stuck={stuck!r}): expected an hs.StuckPolicy, or None.")
        self.stuck = StuckPolicy() if stuck is None else stuck
        self._called = "The loss scaler" if name == "loss_scaler" else f"The loss scaler {name!r}"
        self._take_variables()

    @property
    def strategy(self) -> Strategy:
        """How the scale moves. It is chosen when the scaler is made, which makes the variables of its state."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: Strategy) -> None:
        raise InvalidArgument(
            f"LossScaler.strategy = {strategy!r:.100}: a scaler holds the state of the strategy that it was made with. "
            "Make a new LossScaler, and a new step around it; a run that goes on takes "
            "Checkpoint(resume=True, changed=['loss_scaler'])."
        )

    def __repr__(self) -> str:
        """The strategy, and where it stands; in a graph, where nothing can be read, the strategy alone."""
        stands = f": {self._stored.in_words()}" if tf.executing_eagerly() else ""
        return f"{type(self).__name__}({in_words(self.strategy)}){stands}"

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._take_variables()

    def _take_variables(self) -> None:
        # A checkpoint finds them by these names.
        stored = self._stored
        self._state, self._counts, before_retries = stored.belong_to(self, lambda: self._watch.history.forget())
        if before_retries:
            self._before_retries = before_retries
        self._open_step, self._last_skip = self._calls.step.entries(), self._kept.entries()
        self._all_variables = [
            stored.floats.variable,
            stored.counts.variable,
            *stored.apart.values(),
            self._calls.step.variable,
            self._kept.variable,
        ]

    @property
    def stuck(self) -> StuckPolicy:
        """When `check` considers the scaler stuck, and what it does then. A new policy starts a new history."""
        return self._watch.policy

    @stuck.setter
    def stuck(self, policy: StuckPolicy) -> None:
        self._watch = Watch(policy)

    @property
    def state(self) -> Any:
        """The strategy's current state, a NamedTuple of tensors, with `loss_scale` kept within the bounds."""
        return self._stored.now()._replace(loss_scale=self.loss_scale)

    @property
    def loss_scale(self) -> tf.Tensor:
        """The scale that multiplies the next loss, scalar float32.

        A value outside the strategy's bounds counts as the nearest bound, a NaN as the strategy's initial scale. Only a
        damaged or foreign checkpoint can hold such values.

        You may multiply the loss by it yourself, in place of `scale`. Read it once a step, while the tape records; the
        gradients are then unscaled by the value you read. A read outside the tape is meant for logging. A graph still
        recognises gradients that carry such a value. Eager mode refuses them once the scale has moved.
        """
        return self._calls.scales_by_hand() if tape_records() else self._calls.reads()

    def assign_scale(self, loss_scale: float) -> None:
        """Gives the next loss another scale, outside of a step: to repeat a step at the scale that it had.

        Args:
            loss_scale: It is kept within the strategy's bounds as a step uses it.
        """
        self._state["loss_scale"].assign(loss_scale)

    @property
    def counters(self) -> Counters:
        """The steps attempted, applied and skipped so far."""
        return self._stored.counters()

    @no_autograph
    def scale(self, loss: Any) -> tf.Tensor:
        """Multiplies the loss by the loss scale, always in float32: the product itself cannot overflow in 16 bits.

        A 16-bit loss still receives the scale as a 16-bit gradient. For float16 that limits the scale to 2^15. Compute
        the loss in float32.

        Differentiate the result, or sums and multiples of such results. Compute a square, a root or a limit before.

        Args:
            loss: Scalar of a floating dtype.

        Returns:
            The scaled loss, scalar float32.

        Raises:
            InvalidArgument: If the loss has another shape or dtype, or was scaled already.
        """
        loss = as_loss(loss)
        self._calls.check_loss(loss)
        # A `tf.autodiff.ForwardAccumulator` cannot follow `ensure_shape` in a graph.
        loss = tf.cast(loss if loss.shape.rank == 0 else tf.ensure_shape(loss, []), tf.float32)
        return self._calls.scaled(loss * self._calls.scales(loss))

    @no_autograph
    def unscale(
        self,
        grads: Sequence[gradients.Gradient],
        variables: Sequence | MasterWeights | None = None,
        *,
        loss_scale: tf.Tensor | None = None,
    ) -> list[gradients.Gradient]:
        """Turns gradients of the scaled loss into gradients of the loss, for a step written in the long form.

        It divides them by the scale that the last `scale` used, even after an `update`.

        The gradient of a variable with `overwrite_with_gradient`, as in Keras's float8 layers, is its new value. Pass
        `variables`, and it stays as it is. `apply(..., unscaled=True)` takes the division back by itself, but an
        optimizer of your own would not.

        Args:
            grads: Tensors of any floating dtype, `tf.IndexedSlices` or None.
            variables: The variables the gradients belong to, or a `MasterWeights` over them.
            loss_scale: As of `apply`, for gradients that you kept together with it. Default: the scale of their loss.

        Returns:
            The same structure in float32, or float64 where a gradient is. Duplicate indices are summed unless
            `sum_duplicates` is False.

        Raises:
            InvalidArgument: If the gradients are unscaled already, or are not the scale times those of a loss, or do
                not match the variables.
        """
        grads = as_list("unscale", grads)
        values = [False] * len(grads)
        model: list = []
        if variables is not None:
            targets = variables.weights if isinstance(variables, MasterWeights) else as_variables("unscale", variables)
            check_gradients(grads, targets, "unscale")
            values = list(map(gradients.overwrites, targets))
            model = variables.model_variables if isinstance(variables, MasterWeights) else targets
        divide = gradients.unscale if self.sum_duplicates else gradients.divide
        named = None if loss_scale is None else as_scale("unscale: loss_scale", loss_scale)
        divided = divide(grads, self._calls.unscales(grads, model, named))
        # In eager mode a cast is a pass over the gradient, and few steps have a new value among them.
        if any(values):
            wide = gradients.widened(grads)
            divided = [own if keeps else one for one, own, keeps in zip(divided, wide, values, strict=True)]
        result = marked_unscaled(divided, grads, values)
        self._calls.unscaled(grads, result)
        return result

    @no_autograph
    def apply(
        self,
        optimizer: optimizers.Optimizer,
        grads: Sequence[gradients.Gradient] | None,
        variables: Sequence | MasterWeights | None = None,
        *,
        clip_norm: float | tf.Tensor | None = None,
        clip: ClipByNorm | ClipByValue | None = None,
        rollback: Snapshot | None = None,
        allow_16bit_updates: bool = False,
        diagnose: Again | None = None,
        again: Again | None = None,
        update: bool = True,
        when: bool | tf.Tensor = True,
        unscaled: bool | tf.Tensor = False,
        loss_scale: tf.Tensor | None = None,
        loss: tf.Tensor | None = None,
    ) -> Outcome:
        """Applies the step if all unscaled gradients and their squared global norm are finite, else skips it.

        An applied step unscales, clips, updates the float32 or float64 weights and rounds masters into the model. It
        also restores the elements of `rollback` that became non-finite. A skipped step leaves every bit of the
        variables, slots, `optimizer.iterations` and masters unchanged, and restores all of `rollback`. In both cases
        the strategy then adjusts the scale and the counters advance.

        An optimizer can turn finite gradients into non-finite values, in a variable or in one of its own. Such a step
        is skipped, too, and everything is rolled back. The optimizer's own variables are those in its attribute
        `variables`. A function has none: state that it keeps elsewhere is neither checked nor rolled back. In a graph
        an error inside an optimizer or a constraint, such as a failed assertion, leaves what moved before it.

        Under a `tf.distribute` strategy call it inside `strategy.run`, with each replica's gradients. They are first
        summed over the replicas in float32. The finite check, the norm and the clipping use the sum. So divide the loss
        by the size of the *global* batch.

        Args:
            optimizer: A Keras optimizer, also one of tf-keras, or any function `(grads, variables) -> None`. It is
                called with the unscaled gradients that are not None, in float64 for a float64 variable and in float32
                for any other. On several replicas each replica calls a function with the same summed gradients. Create
                the function's own variables in the strategy's scope, like all others.
            grads: Gradients of the *scaled* loss, one for each variable: tensors of a floating dtype,
                `tf.IndexedSlices` or None. A warning names the variables whose gradient is None, once. Leave out of
                both lists what the loss is not meant to reach.
            variables: The variables the gradients belong to, or a `MasterWeights` over them.
            clip_norm: Largest global norm of the unscaled gradients, or None.
            clip: In place of `clip_norm`: `ClipByNorm(1.0)`, which clips each gradient alone, or `ClipByValue(1.0)`.
            rollback: `snapshot(model.non_trainable_variables)`, taken before the forward pass. A skip restores it.
                BatchNorm's statistics then never hold values from a step that did not happen.
            allow_16bit_updates: Let the optimizer update 16-bit variables. In float16 Adam's epsilon and second moments
                underflow, and the optimizer itself makes infinities. The promise does not cover this.
            diagnose: A function from a scalar output gradient to the gradients, such as
                `lambda small: tape.gradient(scaled, weights, output_gradients=small)` with a persistent tape. It is
                called only on a skip, twice: for a loss scale of 1, and for 2^-14 or the strategy's floor if that is
                less. `outcome.lower_helps` is True if the gradients are finite at 1. `outcome.cause` is BACKWARD
                instead of OVERFLOW if they are non-finite at both, or if those that are non-finite at 1 are flushed to
                zero at the lower scale. Each replica calls the function by itself. It must not need other replicas, as
                the gradient of a synchronised BatchNorm does.
            again: Such a function, with None for `grads`: it is called for them, with 1. If only the scaled backward
                pass overflows it is called again, in this step, for the scales that the strategy backs off to.
            update: False leaves the scale and the counters to one `update` after several `apply`, each of which decides
                for itself; `apply_together` decides once. Not with a `SpikeGuard`, which judges whole steps.
            when: Scalar bool. False does nothing, for accumulation. The outcome is then not applied, with norms of NaN
                and no cause. On several replicas it counts as False on all of them if it is False on any. An overflow
                is then neither skipped nor counted, and the scale does not back off. So `when=norm < limit` is False
                for ever after an overflow, whose norm is infinite. To leave out large gradients, write
                `when=(norm < limit) | ~tf.math.is_finite(norm)`, or put a `SpikeGuard` around the strategy.
            unscaled: Scalar bool, the same on all replicas: whether the gradients are unscaled already. A strategy that
                needs histograms sees them unchanged.
            loss_scale: The scale that the gradients carry, scalar float32, for gradients that you kept together with
                `outcome.loss_scale` or `scale_of_gradients`. Default: the scale of their own loss. In a graph it is
                found by what they are computed from. Eager mode finds it by the losses that a tape passed before they
                were made, and that are not applied yet. Gradients that come as arguments, or from a variable that
                another function fills, carry the scale of the last loss.
            loss: What a `SpikeGuard`, or another strategy, judges as the loss of the step, scalar float32; on several
                replicas the share of this one, which are summed. Default: what `scale` was given since the last step.

        Returns:
            What happened, as tensors.

        Raises:
            InvalidArgument: If the lists do not match, every gradient is None, a dtype or shape is wrong, 16-bit
                variables have no masters, or the optimizer scales losses itself. If the gradients carry more than one
                scale, it cannot be known which one they carry, or they are not the scale times those of a loss.
        """
        check_arguments(optimizer, clip_norm=clip_norm, clip=clip)
        # Other calls of `apply`, another micro-batch of a window or a function may have reasons to train a part.
        reaches_all = bool(update) and when is True and hasattr(optimizers.as_called_by_the_gate(optimizer), "apply")
        when, unscaled, update = as_flag("apply: when", when), as_flag("apply: unscaled", unscaled), bool(update)
        check_apply(grads, variables, rollback, {"diagnose": diagnose, "again": again}, unscaled, update)
        self._spikes.check_whole_step(update)
        grads = as_list("apply", first_gradients(again) if again else grads)
        given = variables if isinstance(variables, MasterWeights) else as_variables("apply", variables)
        share = Share(optimizer, grads, given, clip_norm, clip)
        check_pairs(grads, share.weights, allow_16bit_updates)
        outcome, _ = self._apply_shares(
            [share],
            rollback=rollback,
            diagnose=diagnose,
            again=again,
            update=update,
            when=when,
            unscaled=unscaled,
            loss_scale=loss_scale,
            loss=loss,
            reaches_all=reaches_all,
        )
        return outcome

    def _apply_shares(
        self,
        shares: Sequence[Share],
        *,
        rollback: Snapshot | None = None,
        when: bool | tf.Tensor = True,
        loss_scale: tf.Tensor | None = None,
        diagnose: Again | None = None,
        again: Again | None = None,
        update: bool = True,
        unscaled: bool | tf.Tensor = False,
        loss: tf.Tensor | None = None,
        reaches_all: bool = False,
    ) -> tuple[Outcome, list[Outcome]]:
        """What `apply` and `apply_together` do with arguments that they have checked: one decision for all shares.

        Each share has its own optimizer, and lists in place of other iterables. With `again` the gradients are those
        that it returns for 1. `reaches_all` says that the loss is meant to reach all variables: a warning names those
        without a gradient. All other arguments are those of `apply`.

        Returns:
            The outcome of the step, and for each share the same outcome with the norms of its own gradients.
        """
        self._spikes.check_optimizers(len(shares))
        grads = [grad for share in shares for grad in share.grads]
        targets = [weight for share in shares for weight in share.weights]
        model = [variable for share in shares for variable in share.model]
        replicas.check_inside(targets)
        check_rescaled(model)
        self._keep_trainable(shares, rollback)
        undivided = self._calls.undivided(grads, targets, unscaled)
        carried, moved = self._calls.applies(
            grads,
            targets,
            model,
            unscaled=unscaled,
            when=when,
            ends=update,
            reaches_all=reaches_all,
            rolls_back=rollback is not None,
            loss_scale=None if loss_scale is None else as_scale("apply: loss_scale", loss_scale),
        )
        with not_judged():
            retries = tf.constant(0, tf.int64)
            if again is not None:
                grads, carried, retries = self._retry(grads, carried, again, when)
            else:
                grads = undivided
            if moved:
                rollback = Snapshot(tuple(one.variable for one in moved), tuple(one.before for one in moved))
            loss_scale = carried.loss_scale
            alone = replicas.replica_count() == 1
            parts = [Part.of(share, self.sum_duplicates) for share in shares]

            def on_skip(reason: tf.Tensor, replica: tf.Tensor | None, where: tf.Tensor | None) -> tf.Tensor:
                if diagnose is not None and alone and where is None:
                    reason = cause_from_second_pass(Skip.of(reason), loss_scale, self.strategy, diagnose).packed()
                return self._kept.keep(loss_scale, reason, replica, name_offset(), where, counted=update)

            def name_offset() -> int:
                # Known when the optimizers have created their slots.
                named = [part.named() for part in parts]
                return self._names.begin(named, list(map(replicas.native, model)), seen=not gate.selects)

            gate = Gate(
                Targets(parts),
                needs_of(self.strategy),
                self.sum_duplicates,
                self.select,
                self._spikes,
                carried.divisor(unscaled),
                on_skip,
            )
            seen = self._calls.step.loss
            if seen is not None and carried.loss is not None:
                seen = carried.loss
            loss = seen if loss is None or seen is None else tf.cast(loss, tf.float32)
            decision = gate.decide(
                gradients.matching([grad for grad in grads if grad is not None], gate.targets.updated),
                carried.loss_finite,
                rollback,
                tf.convert_to_tensor(when),
                self._stored.move if update else (lambda event, of_loss, when: None),
                () if loss is None else (loss,),
            )
            self._calls.decided(None if update else decision.attempted)
            skip = decision.skip
            if diagnose is not None and not alone and not gate.selects:
                skip = cause_from_second_pass_on_replicas(skip, loss_scale, self.strategy, diagnose, self._kept.correct)
            if not update:
                note_skip_in_trace(self._kept, skip.cause)
            outcome = decision.outcome(skip, loss_scale, name_offset())._replace(retries=retries)
        pairs = zip(decision.norms, decision.clipped_norms, strict=True)
        return outcome, [outcome._replace(grad_norm=norm, clipped_norm=clipped) for norm, clipped in pairs]

    @staticmethod
    def _keep_trainable(shares: Sequence[Share], rollback: Snapshot | None) -> None:
        """Notices where layers are frozen or unfrozen behind a step that was traced."""
        trained: list = []
        for one in shares:
            masters, weights = one.masters, one.weights
            own = masters.trained(one.grads) if masters else TrainableSet.of(weights[at] for at in one.positions)
            own.keep("apply", _RECREATE_HINT)
            trained += own.variables
        if rollback is not None and not tf.executing_eagerly():
            # Weights of frozen layers may be among those of a snapshot.
            TrainableSet.of(trained).rest_of(rollback.variables).warn_of_unfrozen("apply", _RECREATE_HINT)

    @no_autograph
    def retry(
        self, grads: Sequence[gradients.Gradient], again: Again, *, when: Any = True, loss_scale: Any = None
    ) -> tuple[list, tf.Tensor, tf.Tensor]:
        """Does what `apply(again=...)` does first. `again` has to return `grads` for 1, which nothing checks.
        `when` and `loss_scale` are those of `apply`: where the gradients are not going to be applied nothing is done.

        Returns the gradients; what they are scaled by, scalar float32; and the number of retries, scalar int64. The
        gradients carry that scale from here on: `apply` and `unscale` find it, or ask for `loss_scale=`. A graph cannot
        differentiate through it: compute no gradient penalty from what it returns.
        """
        when = as_flag("retry: when", when)
        before = self._calls.carried("retry", grads) if loss_scale is None else self._calls.named(loss_scale)
        with not_judged():
            found, carried, retries = self._retry(grads, before, again, when)
        found, loss_scale = self._calls.retries(grads, before, carried.loss_scale, found)
        return found, loss_scale, retries

    def _retry(self, grads: Sequence, carried: Carried, again: Again, when: Any) -> tuple[list, Carried, tf.Tensor]:
        found = retry(self.strategy, grads, carried, again, self._stored.now(), when)
        self._stored.back_off(found.state, found.retries)
        return found.grads, carried._replace(loss_scale=found.loss_scale), found.retries

    @no_autograph
    def update(self, event: Event) -> None:
        """Adjusts the scale by the strategy and counts the step. A step written in the long form ends with it.

        It does not know why a step was skipped. An `apply(..., update=False)` that skipped the same step does, and
        `explain` then says what it found. On several replicas each calls it with what it saw: the step is finite if it
        is on all of them, and `amax` is the largest of any. A sum of their gradients may be larger: compute `amax` and
        `histogram` of all replicas' gradients where the strategy needs them.

        Args:
            event: The result of the step, such as `Event(finite=all_finite(unscaled))`.

        Raises:
            InvalidArgument: If `event` is not an `Event`, or one of its fields has a wrong shape or dtype.
        """
        check_event(self.strategy, event)
        kept_now = self._kept.kept_now(skip_in_trace(self._kept))
        bad = tf.logical_or(self._calls.step.is_bad(kept_now), self._kept.is_of_loss(kept_now))
        self._calls.updates(event.finite)
        self._stored.move_together(event, bad, lambda finite: self._kept.count(finite, kept_now))

    @property
    def last_skip(self) -> Outcome:
        """The outcome of the last skipped step, without norms.

        Its cause is `Cause.NONE` before the first skip, and after one that `update` counted and no `apply` judged.
        After a checkpoint was restored, `name_offset` is -1 until this process has traced the step that was skipped,
        and the positions of variables are beyond the end of any list.
        """
        return self._spikes.told(self._kept.outcome(self._names.lists))

    def explain(self, outcome: Outcome | Run | None = None) -> str:
        """Says in a sentence what a step did, with the name of the variable. It reads numbers: call it on the host.

        Args:
            outcome: From `apply`. Default: the last skip. Or a `loops.Loop` with a `loops.Explain` among its actions,
                which repeats the last skip if it still holds its batch, and says where it went wrong.

        Raises:
            InvalidArgument: For anything else.
        """
        if outcome is not None and not isinstance(outcome, Outcome):
            if not hasattr(outcome, "why_skipped"):
                raise InvalidArgument(f"explain({outcome!r:.100}): expected an Outcome from apply, or an hs.Loop.")
            return outcome.why_skipped() or self.explain()
        known, counts = self.last_skip if outcome is None else outcome, self._stored.read()
        if outcome is None and int(known.cause) == Cause.NONE:
            return none_skipped(counts.attempted, counts.skipped)
        clips = self._spikes.by_tensor == "clip"
        is_now = bool(counts.consecutive_skips) or outcome is not None
        return self._names.explain(known, self._pinned(float(known.loss_scale)), clips, is_now)

    def _pinned(self, loss_scale: float) -> str:
        return pinned(loss_scale, *host_bounds_of(self.strategy), type(self.strategy).__name__)

    def check(self, reading: Sequence[float] | None = None) -> None:
        """Raises, warns or does nothing if the scaler makes no progress: the `stuck` policy decides.

        It also warns, once, if the last step was applied though its loss was not finite. Call it on the host now and
        then: it reads seven numbers. A `loops.Loop` calls it at each visit.

        Args:
            reading: What `scaler.authoring.reading` returned. Default: it is read now.

        Raises:
            StuckError: If the policy raises. The error names the reason for the last skip.
            InvalidArgument: Inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise InvalidArgument("check() reads numbers on the host: expected a call outside of the tf.function.")
        *numbers, unseen = map(float, self._reading() if reading is None else reading)
        now = self._stored.reading(*numbers)
        self._calls.use.check_ended(now.attempted)
        if unseen and not now.consecutive_skips:
            self._calls.warn_of_unseen_loss(f"The last of {now.attempted:,} attempted steps")
        self._look(self._watch, now)

    def _look(self, watch: Watch, now: Reading, advice: str = "") -> None:
        bounds, spikes = host_bounds_of(self.strategy), self._spikes.too_many(now.consecutive_skips)
        watch.look(self._who, now, *bounds, lambda: f"{self.explain() if now.skipped else ''}{advice}", spikes)

    def _reading(self) -> tf.Tensor:
        """What `check` looks at, as one tensor, float64 [7], for a `tf.function` to return with other results."""
        return self._stored.looked_at(tf.cast(self._calls.step.ended_unseen(), tf.float64))

    def _who(self) -> str:
        return f"{self._called} with {in_words(self.strategy)}"

    @property
    def scale_of_gradients(self) -> tf.Tensor:
        """The scale that gradients carry now, by which `apply` will divide them: scalar float32.

        It is the scale that the last `scale` used, even after an `update`.
        """
        return self._calls.asks()


_RECREATE_HINT = (
    "Create the optimizer, the step and any MasterWeights again after setting `trainable`, or compile the model again."
)
