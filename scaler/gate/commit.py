"""The last part of a step: all of it counts, or nothing does.

A step commits in one of two ways. A branch moves the variables or puts back what the forward pass moved, and waits for
the decision. Selecting waits for nothing: every assignment of the update stores `where(applied, new, old)`. On a GPU a
branch waits until the device is done, and XLA fuses less across it: see `proofs.selects`. In a branch the strategy
moves, too, so that an applied step computes nothing that only a skip needs. A small step on a CPU does both: it selects
new values, which are computed while the decision is, and branches for the rest.

An optimizer of which nothing is proven is tried first: its new values are looked at, and put back if one of them is not
finite. That takes a branch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import call_noninlined, in_xla
from scaler.backend.variables import assigned_where, choose
from scaler.errors import InvalidArgument
from scaler.gate.optimizers import Optimizer, name_of, variables_of
from scaler.gate.rollback import put_back, put_back_non_finite
from scaler.gate.targets import Targets
from scaler.outcome.outcome import Cause, Skip, int64, not_skipped


class Committed(NamedTuple):
    """What became of a step.

    Attributes:
        applied: Scalar bool.
        clipped_norms: Float32, for each part the norm of what its optimizer was given; NaN if the step was skipped.
        reason: Why it was skipped, float32 [6]: see `Skip.packed`.
        replica: Int64, the first replica whose own gradients or loss are to blame, or -1; None on one replica alone.
    """

    applied: tf.Tensor
    clipped_norms: tuple[tf.Tensor, ...]
    reason: tf.Tensor
    replica: tf.Tensor | None


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a step would do.

    Attributes:
        targets: Its variables.
        move: Moves them.
        trial: Tries an optimizer of which nothing is proven; None where new values need no look.
        state: Pairs of another variable that the forward pass moved, and its value before the step, on every replica.
        clipped_norms: As of `Committed`, where the step is applied.
        explain: Why the step is skipped. It looks at the values of gradients if it is told to.
        blame: As `Committed.replica`, where the step is skipped.
        on_skip: Called with the reason, `Committed.replica`, and whether the step is skipped, or None in the branch of
            a skip. It returns why, which it may know better.
        count: Called once the variables have moved, with whether the step was applied, and whether it was not because
            of its loss: the strategy sees the step, and it is counted.
        selects: Whether `branch` selects new values, and branches for the rest.
    """

    targets: Targets
    move: Callable[[], None]
    trial: Trial | None
    state: Sequence[tuple]
    clipped_norms: Callable[[], tuple[tf.Tensor, ...]]
    explain: Callable[[bool], tf.Tensor]
    blame: Callable[[], tf.Tensor | None]
    on_skip: Callable[[tf.Tensor, tf.Tensor | None, tf.Tensor | None], tf.Tensor]
    count: Callable[[tf.Tensor, tf.Tensor], None]
    selects: bool

    def _move_where(self, applied: tf.Tensor) -> None:
        """Moves the variables where a step is applied, scalar bool, without a branch."""
        with assigned_where(applied, [variable for part in self.targets.parts for variable in part.movable]):
            self.move()

    def _count(self, applied: tf.Tensor, of_loss: tf.Tensor) -> None:
        # An update that breaks off is not counted.
        with after_side_effects():
            self.count(applied, of_loss)

    def select(self, strategy: Any, sound: tf.Tensor, when: tf.Tensor) -> Committed:
        """Commits where `sound` and `when`, scalar bools, are true, without a branch. What is proven needs no trial."""
        applied = tf.logical_and(sound, when)
        self._move_where(applied)
        kept = applied if tf.get_static_value(when) else tf.logical_or(applied, tf.logical_not(when))
        put_back_non_finite(strategy, self.state, kept)
        skipped = tf.logical_and(when, tf.logical_not(applied))
        reason, replica = choose(skipped, self.explain(False), not_skipped()), self.blame()
        replica = None if replica is None else choose(skipped, replica, -1)
        norms = tuple(choose(applied, norm, float("nan")) for norm in self.clipped_norms())
        reason = self.on_skip(reason, replica, skipped)
        self._count(applied, _is_of_loss(reason))
        return Committed(applied, norms, reason, replica)

    def branch(self, strategy: Any, sound: tf.Tensor) -> Committed:
        """Commits in a branch of a step that there is."""
        trial = self.trial
        applied = sound if trial is None else trial.try_update(sound, self.move)
        if self.selects:
            self._move_where(applied)
            with after_side_effects():
                applied = tf.identity(applied)

        def apply() -> tuple[tuple[tf.Tensor, ...], tf.Tensor, tf.Tensor | None]:
            if trial is None and not self.selects:
                self.move()
            put_back_non_finite(strategy, self.state)
            norms = self.clipped_norms()
            self._count(tf.constant(True), tf.constant(False))
            return norms, not_skipped(), no_replica(strategy)

        def skip() -> tuple[tuple[tf.Tensor, ...], tf.Tensor, tf.Tensor | None]:
            put_back(strategy, self.state)
            reason = self.explain(True)
            if trial is not None:
                reason = trial.reason(sound, reason)
                # An update that was taken back began with weights that the forward pass may have assigned.
                put_back(strategy, [pair for pair in self.state if getattr(pair[0], "trainable", False)])
            replica = self.blame()
            reason = self.on_skip(reason, replica, None)
            self._count(tf.constant(False), _is_of_loss(reason))
            return (tf.constant(float("nan")),) * len(self.targets.parts), reason, replica

        # Several workers meet in operations that a function of its own cannot hold.
        skip_apart = skip if tf.distribute.has_strategy() else functools.partial(call_noninlined, skip)
        return Committed(applied, *tf.cond(applied, apply, skip_apart))


def _is_of_loss(reason: tf.Tensor) -> tf.Tensor:
    return tf.equal(tf.unstack(reason)[0], float(Cause.LOSS))


@contextlib.contextmanager
def after_side_effects() -> Iterator[None]:
    """What is traced inside runs once all that was traced before has run.

    Otherwise a graph runs an assertion of the loss beside the update, which may be half done when it fails; and the
    update beside what counts it.
    """
    if tf.executing_eagerly():
        yield
        return
    operations = tf.compat.v1.get_default_graph().get_operations()
    # What reads a variable has no side effect, though TensorFlow counts it among those that do.
    before = [one for one in operations if one.op_def.is_stateful and one.type != "ReadVariableOp"]
    # One for all, or each operation that follows would have an edge from each of them.
    with tf.control_dependencies(before if len(before) < 2 else [tf.group(*before)]):
        yield


def no_replica(strategy: tf.distribute.Strategy) -> tf.Tensor | None:
    """What stands for the replica to blame where there is none to blame."""
    return None if strategy.num_replicas_in_sync == 1 else int64(-1)


class Trial:
    """Remembers variables, lets optimizers move them, and puts every bit back if a value is not finite afterwards.

    A value that was not finite before is not the update's doing.

    Remembering copies nothing, but an update then writes to new memory and not in place.

    Args:
        strategy: TensorFlow's, from what `replicas.merge` calls. Each replica has its own values.
        targets: What the step moves.
    """

    def __init__(self, strategy: Any, targets: Targets):
        self._strategy, self._targets = strategy, targets
        movable = [replicas.native(variable) for part in targets.parts for variable in part.movable]
        self._kept = list({id(variable): variable for variable in movable}.values())
        self._looked_at: list[tf.Variable] = []
        self._indices: list[int] = []
        self._owners: list[int] = []
        of_parts, own = targets.split(targets.positions), len(targets.built_for)
        for place, (part, positions) in enumerate(zip(targets.parts, of_parts, strict=True)):
            values = part.own_values
            if part.proven is None:
                self._looked_at += map(replicas.native, [*part.updated, *values])
                self._indices += [*positions, *range(own, own + len(values))]
                self._owners += [place] * (len(positions) + len(values))
            own += len(values)
        self._before = replicas.map_replicas(strategy, _values, *self._kept)
        before = {id(variable): value for variable, value in zip(self._kept, self._before, strict=True)}
        self._old = [before[id(variable)] for variable in self._looked_at]
        self._made: list = []

    def try_update(self, sound: tf.Tensor, update: Callable[[], None]) -> tf.Tensor:
        """Updates where the step is sound, and returns whether it did and all new values are finite, on all replicas.

        Args:
            sound: Scalar bool, the same on all replicas.
            update: Moves variables on every replica.
        """

        def moved() -> tf.Tensor:
            try:
                update()
            except BaseException:  # Whoever stops a run by Ctrl-C finds it whole, too.
                if tf.executing_eagerly() and replicas.replica_count() == 1:
                    self._put_back()
                raise
            self._made = self._made_meanwhile()
            old = [*self._old, *map(tf.zeros_like, self._made)]
            flags = replicas.map_replicas(self._strategy, _all_finite, [*self._looked_at, *self._made], old)
            return tf.reduce_all(tf.stack(replicas.local_values(self._strategy, flags)))

        return replicas.all_of(self._strategy, tf.cond(sound, moved, lambda: tf.constant(False)))

    def reason(self, failed: tf.Tensor, reason: tf.Tensor) -> tf.Tensor:
        """Puts back what was moved where the update `failed`, scalar bool, and says why it does not count.

        Args:
            failed: Whether the step was sound, so that the update is why it does not count.
            reason: What the gradients say otherwise.

        Raises:
            InvalidArgument: If the update made variables, which had no values before it.
        """
        return tf.cond(failed, self._undo, lambda: reason)

    def _undo(self) -> tf.Tensor:
        now, old = ([replicas.local_values(self._strategy, v)[0] for v in one] for one in (self._looked_at, self._old))
        bad = tf.cast(tf.stack(list(map(_spoiled, now, old))), tf.float32)
        nan = tf.stack([tf.reduce_any(tf.math.is_nan(variable)) for variable in now])
        worst = tf.argmax(bad)
        has_nan, index = tf.gather(nan, worst), tf.gather(tf.constant(self._indices, tf.int64), worst)
        # Reads of a variable that is assigned later come first: TensorFlow keeps their order.
        self._put_back()
        if self._made:
            names = " and ".join(name_of(part.optimizer) for part in self._targets.parts)
            raise InvalidArgument(
                f"apply: {names} made its variables in this very step, and values that are not finite with them, which "
                "cannot be put back: the weights were. Create a new optimizer, and have it make its variables before "
                "the first step."
            )
        # A schedule counts steps, so that it is asked once the count is what it was.
        owner = tf.gather(tf.constant(self._owners, tf.int64), worst)
        for place, part in enumerate(self._targets.parts):
            sound = replicas.map_replicas(self._strategy, lambda part=part: _sound_rate(part.optimizer))
            sound = tf.logical_or(replicas.local_values(self._strategy, sound)[0], tf.not_equal(owner, place))
            has_nan, index = tf.logical_and(has_nan, sound), choose(sound, index, -1 - 2 * place)
        return Skip(Cause.UPDATE, has_nan, index).packed()

    def _put_back(self) -> None:
        put_back(self._strategy, zip(self._kept, self._before, strict=True))

    def _made_meanwhile(self) -> list:
        if not tf.executing_eagerly():
            return []
        known = {id(variable) for variable in self._kept}
        own = [replicas.native(variable) for part in self._targets.parts for variable in variables_of(part.optimizer)]
        return [variable for variable in own if id(variable) not in known and variable.dtype.is_floating]


def _sound_rate(optimizer: Optimizer) -> tf.Tensor:
    """Whether the learning rate is finite: scalar bool, true for what has none."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return tf.constant(True)
    rates = [each.learning_rate for each in getattr(optimizer, "optimizers", (optimizer,))]
    return tf.reduce_all([tf.math.is_finite(tf.cast(rate, tf.float32)) for rate in rates])


def _values(*variables: Any) -> list[tf.Tensor]:
    return [tf.identity(variable) for variable in variables]


def _all_finite(variables: Sequence, old: Sequence) -> tf.Tensor:
    """Whether no value stopped being finite: one pass over them, unless their squares do not add up."""

    def one_by_one() -> tf.Tensor:
        return tf.logical_not(tf.reduce_any(tf.stack(list(map(_spoiled, variables, old)))))

    if not variables:
        return tf.constant(True)
    if in_xla():
        return one_by_one()
    squares = tf.add_n([tf.cast(tf.nn.l2_loss(variable), tf.float32) for variable in variables])
    return tf.cond(tf.math.is_finite(squares), lambda: tf.constant(True), lambda: call_noninlined(one_by_one))


def _spoiled(variable: Any, old: tf.Tensor) -> tf.Tensor:
    """Whether a value is not finite that was before."""
    return tf.reduce_any(tf.logical_and(tf.math.is_finite(old), tf.logical_not(tf.math.is_finite(variable))))
