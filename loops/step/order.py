"""The order of a step, for a `TrainStep` and for the parts of a `ComposedStep` alike.

The pass, then for each loss scaler: retry, add to the window, apply or skip, and what is returned of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaler
from loops.step.accumulation import MicroBatches
from loops.step.losses import replica_count, share_of_weight
from loops.step.passes import Role, Taken, nothing, repeat, replicas_meet, take, take_if
from loops.step.probe_rows import Look


class Decided(NamedTuple):
    """What a loss scaler decided.

    Attributes:
        attempted: Scalar bool, whether it was to decide.
        applied: Scalar bool, whether all roles moved.
        cause: Scalar int64, why they did not, a `scaler.Cause`.
        variable: Scalar int64, the variable to look at first, as a position in the weights of all roles; or -1.
        outcomes: Of each role.
    """

    attempted: tf.Tensor
    applied: tf.Tensor
    cause: tf.Tensor
    variable: tf.Tensor
    outcomes: list[scaler.Outcome]


class Result(NamedTuple):
    """What a group did.

    Attributes:
        outputs: The scalars of each role by name, and the vectors of its probes.
        decided: None if it was certain not to be its turn.
        retries: How often its gradients were taken again, scalar int64; None if they could not be.
    """

    outputs: list[dict[str, tf.Tensor]]
    decided: Decided | None = None
    retries: tf.Tensor | None = None


class Group:
    """Roles about which one loss scaler decides, in the trace of a step. Its methods follow the order of a step.

    Args:
        roles: The roles.
        window: The sums of their micro-batches, or None.
        length: Micro-batches of the window.
        no_retry: The message where their gradients can be taken only once; None if backward passes that overflow are
            not repeated.
        turn: Whether it is their turn, scalar bool; False as such only in eager mode.
        others: The ids of variables that other groups put back.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        window: MicroBatches | None,
        length: int | tf.Tensor,
        no_retry: str | None,
        *,
        turn: tf.Tensor | bool = True,
        others: frozenset[int] = frozenset(),
    ):
        self.roles, self.window, self.length, self.turn = roles, window, length, turn
        self._no_retry, self._others = no_retry, others
        self.loss_scaler = roles[0].loss_scaler
        # As they are before a decision, and before a retry.
        self._scales = {"loss_scale": self.loss_scaler.loss_scale, **scaler.authoring.spike_limits(self.loss_scaler)}
        if no_retry is not None:
            self._scales["retries"] = tf.constant(0, tf.int64)
        self.retries: tf.Tensor | None = None

    def look(self) -> list[Look | None]:
        """Looks at the variables before they move, for the probes of each role."""
        self._looks = [role.probing.look(role, self._scales["loss_scale"], self.turn) for role in self.roles]
        return self._looks

    def repeat(self, roles: Sequence[Role], forward: Callable[[], Any], meets: bool) -> bool:
        """Prepares a retry. Returns whether it may need the tape of the pass that is taken next.

        Args:
            roles: All that share the pass.
            forward: Returns what they read their losses from.
            meets: Whether replicas wait for each other in it.
        """
        self._again, twice = None, False
        if self._no_retry is not None and not meets:
            scale = self._scales["loss_scale"]
            self._again, twice = repeat(roles, self.roles, forward, self.length, scale)
        return twice

    def keep(self, moved: scaler.Snapshot) -> None:
        """Keeps what a skip puts back: the state from before the step, or from before the first micro-batch."""
        own = [pair for pair in zip(moved.variables, moved.values, strict=True) if id(pair[0]) not in self._others]
        now = scaler.Snapshot(tuple(one for one, _ in own), tuple(value for _, value in own))
        self._before = self.window.open(now) if self.window else now

    def retry(self, passes: Sequence[Taken]) -> None:
        """Takes the gradients of all roles again where only their scaled backward passes overflowed."""
        self._passes, self._grads = passes, [grad for one in passes for grad in one.grads]
        self._loss_scale: tf.Tensor | None = None
        if self._no_retry is None or self.turn is False:
            return
        looks = [one.again for one in passes if one.again is not None]
        if self._again is None and len(looks) < len(passes):
            raise scaler.InvalidArgument(self._no_retry)
        again = self._again or (lambda small: [grad for look in looks for grad in look(small)])
        # Otherwise the scale that they carry is known from the graph, as without a retry.
        named = self.window is not None or self.turn is not True or len(self.roles) > 1
        carried = self.loss_scaler.scale_of_gradients if named else None
        found = self.loss_scaler.retry(self._grads, again, when=self.turn, loss_scale=carried)
        self._grads, self._loss_scale, self.retries = found
        self._scales |= {"loss_scale": self._loss_scale, "retries": self.retries}

    def finish(self, inputs: Any) -> Result:
        """Decides.

        Args:
            inputs: The examples of the batch, or tensors that begin with them.
        """
        weight = self._passes[0].weight
        # The mean of the replicas' losses is to be the loss of the whole batch.
        share = None if weight is None or replica_count() == 1 else share_of_weight(weight)
        decided = None
        if self.turn is False and not self.window:
            # The pass has moved their state, too.
            self._before.restore_unless(tf.constant(True))
        else:
            decided = self._decide(share)
        outputs = []
        for place, (role, one) in enumerate(zip(self.roles, self._passes, strict=True)):
            own = self._outputs(one.loss if share is None else one.loss * share, one.extra, decided, place)
            if decided is None or self.turn is False:
                own |= role.probing.left_out()
            else:
                decision = decided.attempted, decided.outcomes[place]
                own |= role.probing.outputs(self._looks[place], one.seen, one.grads, role.optimizer, *decision, inputs)
            outputs.append(own)
        return Result(outputs, decided, self.retries)

    def left_out(self, extra: Mapping[str, Mapping[str, tf.DType]]) -> Result:
        """The result of an eager call in which nothing is computed, as it is not the turn of the group.

        Args:
            extra: The dtypes of what the loss function of each role adds.
        """
        outputs = []
        for role in self.roles:
            added = {name: nothing(dtype) for name, dtype in extra[role.name].items()}
            outputs.append({**self._outputs(nothing(tf.float32), added), **role.probing.left_out()})
        return Result(outputs)

    def _decide(self, share: tf.Tensor | None) -> Decided:
        """Applies or skips."""
        roles, first, grads, loss_scale = self.roles, self._passes[0], self._grads, self._loss_scale
        when: Any = True if self.turn is True else tf.convert_to_tensor(self.turn)
        judged = None
        if (window := self.window) is not None:
            loss_scale = self.loss_scaler.scale_of_gradients if loss_scale is None else loss_scale
            may_branch = not scaler.authoring.selects(self.loss_scaler)
            window.add(grads, loss_scale, may_branch, length=self.length, loss=first.loss, weight=first.weight)
            self._before.restore_unless(window.whole)
            grads, judged = window.mean(grads, first.weight is not None)
            when = window.complete if when is True else tf.logical_and(window.complete, when)
        elif share is not None:
            judged = first.loss * share / replica_count()
            grads = [_times(grad, share, of) for grad, of in zip(grads, roles[0].variables, strict=True)]
        options = {"rollback": self._before, "when": when, "loss_scale": loss_scale}
        if len(roles) > 1:
            outcome, outcomes = _apply_together(self.loss_scaler, roles, grads, **options)
        else:
            (role,) = roles
            outcome = self.loss_scaler.apply(
                role.optimizer,
                grads,
                role.masters or role.variables,
                clip_norm=role.clip_norm,
                clip=role.clip,
                allow_16bit_updates=role.allow_16bit_updates,
                loss=judged,
                **options,
            )
            outcomes = [outcome]
        # The variables of an optimizer come after the weights.
        variable, weights = outcome.variable, sum(len(role.variables) for role in roles)
        variable = tf.where(variable < weights, variable, -1)
        return Decided(tf.convert_to_tensor(when), outcome.finite, outcome.cause, variable, outcomes)

    def _outputs(
        self, loss: tf.Tensor, extra: Mapping[str, tf.Tensor], decided: Decided | None = None, place: int = 0
    ) -> dict[str, tf.Tensor]:
        """What a step returns of a role in any case, and what its loss function added."""
        if decided is None:
            no, nan, outcome = tf.constant(False), tf.constant(float("nan")), None
            attempted, applied, grad_norm, clipped_norm = no, no, nan, nan
        else:
            outcome = decided.outcomes[place]
            attempted, applied = decided.attempted, outcome.finite
            grad_norm, clipped_norm = outcome.grad_norm, outcome.clipped_norm
        outputs = {
            "loss": loss,
            "attempted": attempted,
            "applied": applied,
            "grad_norm": grad_norm,
            "clipped_norm": clipped_norm,
            **self._scales,
        }
        if clips_by_tensor(self.loss_scaler):
            outputs["clipped_tensors"] = tf.constant(0, tf.int64) if outcome is None else outcome.clipped_tensors
        return {**outputs, **extra}


@scaler.authoring.no_autograph
def take_step(
    groups: Sequence[Group],
    forward: Callable[[], Any],
    *,
    models: Sequence[keras.layers.Layer],
    state: scaler.authoring.LayerState,
    inputs: Any,
    in_branch: bool = False,
    compiled: Callable[[tf.Tensor | None], Taken] | None = None,
) -> list[Result]:
    """One pass, the gradients of all roles, and then the decisions.

    Args:
        groups: Those that share the pass.
        forward: Returns what their roles read their losses from.
        models: All that the pass may call.
        state: Watches the layers that it calls.
        inputs: The examples of the batch, or tensors that begin with them.
        in_branch: Whether nothing is computed where it is not the turn of the group, which has one role.
        compiled: Takes the pass of the only role in place of `forward`, as XLA compiled it.
    """
    roles = [role for group in groups for role in group.roles]
    turns = [group.turn for group in groups for _ in group.roles]
    looks = [look for group in groups for look in group.look()]
    due, length, meets = [one and one.due for one in looks], groups[0].length, replicas_meet(models)
    # What is traced for a retry calls the layers of a tf.function, which the pass then only repeats.
    with state.watched() as moved:
        twice = any([group.repeat(roles, forward, meets) for group in groups])
        if compiled:
            passes = [compiled(due[0])]
        elif in_branch:
            # In the branch it is the role's turn, and the branch is where its tape is.
            due = [looks[0] and looks[0].at_its_turn]
            passes = [take_if(turns[0], lambda: take(roles, forward, length, turns=[True], due=due)[0])]
        else:
            passes = take(roles, forward, length, turns=turns, due=due, again=twice)
    before, rest = moved.snapshot(), iter(passes)
    for group in groups:
        group.keep(before)
    # All of them before any role moves, since a retry repeats the forward pass of all.
    for group in groups:
        group.retry([next(rest) for _ in group.roles])
    for role, one in zip(roles, passes, strict=True):
        if role.layerwise:
            role.layerwise.update(one.groups)
    return [group.finish(inputs) for group in groups]


def _apply_together(
    loss_scaler: scaler.LossScaler, roles: Sequence[Role], grads: list, *, loss_scale: Any, **options: Any
) -> tuple[scaler.Outcome, list[scaler.Outcome]]:
    """One decision over the gradients of all roles; then each optimizer takes its own where all were finite."""
    rest, shares = iter(grads), []
    for role in roles:
        own = [next(rest) for _ in role.variables]
        shares.append(scaler.Share(role.optimizer, own, role.masters or role.variables, role.clip_norm, role.clip))
    loss_scale = loss_scaler.scale_of_gradients if loss_scale is None else loss_scale
    return scaler.apply_together(loss_scaler, shares, loss_scale=loss_scale, **options)


def _times(grad: Any, share: tf.Tensor, variable: Any) -> Any:
    """A replica's gradient times its share of the weight, in float32: 16 bits might overflow."""
    if grad is None or scaler.gradients.overwrites(variable):
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(grad.values, tf.float32) * share, grad.indices, grad.dense_shape)
    return tf.cast(grad, tf.float32) * share


def clips_by_tensor(loss_scaler: scaler.LossScaler) -> bool:
    """Whether the scaler is a `scaler.SpikeGuard` that clips gradients one by one, and counts them."""
    return getattr(loss_scaler.strategy, "by_tensor", None) == "clip"
