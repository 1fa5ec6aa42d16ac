"""What a decision moves beside the weights: the strategy's state and the counters, in variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.integers import saved_as_int32
from scaler.backend.restores import awaited_shape, scope_of
from scaler.backend.variables import (
    explain_other_shapes,
    made_outside,
    mark_owner,
    owner_of,
    shared_variable,
    when_restored,
)
from scaler.errors import InvalidArgument
from scaler.outcome.stuck import Reading
from scaler.strategies import Event, Strategy, tensor_norms
from scaler.strategies.base import (
    after_step,
    as_taken,
    check_state,
    int32_fields,
    only_scale,
    usable_scale,
    usable_scale_on_host,
    usable_state,
)
from scaler.strategies.nested import inner_of
from scaler.strategies.spike_guard import guard_of


class Counters(NamedTuple):
    """Counts of steps since the scaler was created, as scalar int64 tensors.

    Attributes:
        attempted: Calls of `apply` or `update`: `applied + skipped`.
        applied: Steps with finite gradients, which moved the weights.
        skipped: Steps that changed nothing.
        consecutive_skips: Skipped steps since the last applied one.
    """

    attempted: tf.Tensor
    applied: tf.Tensor
    skipped: tf.Tensor
    consecutive_skips: tf.Tensor


class StoredState:
    """The state of a strategy, and how many steps were decided. All replicas share the variables.

    Attributes:
        fields: The variables of the state, by the names of its fields.
        counts: Those of the counters, by name. The higher bits of "attempted" and "consecutive_skips" count those of
            them that were skipped because of their loss: a variable more would cost each step.
        before_retries: For a guard, the state before the first retry of a step that is not decided yet. Its loss scale
            is 0 if there was no retry. Empty for a strategy that has no spikes, or nothing to retry at.
        tensors: The variables of the state that have a number for each variable of a step. Empty until the first step
            for a guard that watches each gradient, and always for others.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        state = strategy.init()
        check_state(strategy, state)
        self._type = type(state)
        fields = {field: tf.convert_to_tensor(value) for field, value in state._asdict().items()}
        self._int32 = int32_fields(fields)
        # How many variables a step has is not known yet.
        later = tensor_norms.FIELDS if self._by_tensor else ()
        now = {field: value for field, value in fields.items() if field not in later}
        self.fields = {field: shared_variable(value, field) for field, value in now.items()}
        self.tensors: dict[str, tf.Variable] = {}
        counts = ("attempted", "applied", "consecutive_skips")
        self.counts = {field: shared_variable(tf.constant(0, tf.int64), field) for field in counts}
        retries = guard_of(strategy) is not None and only_scale(strategy) is None
        kept = inner_of(state)._asdict() if retries else {}
        self.before_retries = {field: shared_variable(tf.zeros_like(value), field) for field, value in kept.items()}

    @property
    def _by_tensor(self) -> bool:
        guard = guard_of(self._strategy)
        return guard is not None and guard.by_tensor is not None

    def belong_to(
        self, owner: object, on_restored: Callable[[], None], save_tensors: Callable[[dict[str, tf.Variable]], None]
    ) -> None:
        """Makes `owner` the owner of the variables, unless they have one, and calls `on_restored` after each restore.

        A deep copy and an unpickled scaler have variables of their own. A shallow copy shares those of the original.

        Args:
            owner: Which variables are found by.
            on_restored: Called whenever a checkpoint is restored.
            save_tensors: Called with `tensors` once there are any: a checkpoint has to find them.
        """
        own = (*self.fields.values(), *self.counts.values(), *self.before_retries.values(), *self.tensors.values())
        if any(owner_of(variable) is not None for variable in own):
            return
        self._owner, self._save_tensors = weakref.ref(owner), save_tensors
        for variable in own:
            mark_owner(variable, owner)
        for kept in (self.fields, self.before_retries):
            for field in self._int32.intersection(kept):
                saved_as_int32(kept[field])
        for field, variable in self.fields.items():
            explain_other_shapes(variable, f"{type(self._strategy).__name__}'s {field}", _OF_LENGTH)
        if self.tensors:
            self._explain_tensors()
            save_tensors(self.tensors)
        when_restored(self.counts["attempted"], on_restored)
        if self._by_tensor:
            when_restored(self.counts["applied"], self._make_awaited)

    def _make_awaited(self) -> None:
        """Makes `tensors` for the values that a checkpoint has of them: saved before a step they would be lost."""
        owner = self._owner()
        if self.tensors or owner is None:
            return
        shape = awaited_shape(owner, TENSORS, tensor_norms.FIELDS[1])
        if shape is not None:
            with scope_of(self.counts["applied"]):
                self.remember_tensors(shape[0])

    def _explain_tensors(self) -> None:
        for field, variable in self.tensors.items():
            explain_other_shapes(variable, f"SpikeGuard's {field}", _OF_TENSORS)

    def remember_tensors(self, count: int) -> None:
        """Makes the variables that have a number for each of `count` variables of a step.

        That is at the first step, or when a checkpoint that has them is restored before it, and gives them its values.

        Raises:
            InvalidArgument: If there are already those of another count.
        """
        if self.tensors:
            known = self.tensors[tensor_norms.FIELDS[1]].shape[0]
            if known != count:
                raise InvalidArgument(
                    f"SpikeGuard(by_tensor=...) remembers the norms of {known} gradients, and this step has {count}: "
                    "expected as many at every step, in the same order. Make a new LossScaler for others."
                )
            return
        guard = guard_of(self._strategy)
        assert guard is not None
        with made_outside():
            state = guard.init(count)
            self.tensors = {field: shared_variable(getattr(state, field), field) for field in tensor_norms.FIELDS}
            for variable in self.tensors.values():
                mark_owner(variable, self._owner())
            self._explain_tensors()
            self._save_tensors(self.tensors)

    def __getstate__(self) -> dict:
        # Strategies around others make the class of their state themselves, and pickle does not find it.
        return {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        with tf.init_scope():
            self._type = type(self._strategy.init())

    def now(self) -> Any:
        """The state, with a loss scale that a step may use."""
        fields = {field: tf.identity(variable) for field, variable in (self.fields | self.tensors).items()}
        fields = as_taken(self._strategy, fields, self._int32)
        if self._by_tensor and not self.tensors:
            fields |= {field: getattr(self._strategy.init(), field) for field in tensor_norms.FIELDS}
        return usable_state(self._strategy, self._type(**fields))

    def scale_now(self) -> tf.Tensor:
        """The loss scale that a step may use, scalar float32."""
        # Read in any case, which costs nothing where nobody uses it: by this a `Loop` finds the scaler in a step.
        stored, only = tf.identity(self.fields["loss_scale"]), only_scale(self._strategy)
        # As a constant it takes no operation to multiply by 1, or to divide by it.
        return usable_scale(self._strategy, stored) if only is None else tf.constant(only)

    def counters(self) -> Counters:
        """The counters as tensors."""
        attempted, applied, consecutive = (tf.identity(variable) % _BAD for variable in self.counts.values())
        return Counters(attempted, applied, attempted - applied, consecutive)

    def in_words(self) -> str:
        """The loss scale and the counters, for a person; in eager mode."""
        counts = self.counters()
        return (
            f"loss scale {float(self.scale_now()):g}, {int(counts.applied)} steps applied, "
            f"{int(counts.skipped)} skipped"
        )

    def looked_at(self) -> list[tf.Tensor]:
        """What `reading` takes: three counters, and the loss scale as it is stored."""
        return [tf.convert_to_tensor(one) for one in (*self.counts.values(), self.fields["loss_scale"])]

    def reading(self, attempted: float, applied: float, consecutive_skips: float, stored: float) -> Reading:
        """The numbers of `looked_at` on the host, with a loss scale that a step may use."""
        usable = usable_scale_on_host(self._strategy, stored)
        bad, attempts = divmod(int(attempted), _BAD)
        bad_in_a_row, in_a_row = divmod(int(consecutive_skips), _BAD)
        return Reading(attempts, attempts - int(applied), in_a_row, usable, bad, bad_in_a_row)

    def read(self) -> Reading:
        """The counters and the loss scale as they are, on the host."""
        return self.reading(*map(float, self.looked_at()))

    def back_off(self, state: Any, retries: tf.Tensor) -> None:
        """Assigns the state after overflows that were retried within a step. Every replica calls it, with the same."""

        def assign(strategy: Any, state: Any, retries: tf.Tensor) -> None:
            after = type(state)(*(replicas.of_each(strategy, value)[0] for value in state))
            retried = replicas.of_each(strategy, retries)[0] > 0
            self._keep_where(retried)
            for field, variable in self.fields.items():
                replicas.assign_alike(variable, tf.where(retried, _like(variable, getattr(after, field)), variable))

        replicas.merge(assign, state, retries)

    def _keep_where(self, retried: tf.Tensor) -> None:
        """Keeps the state for a step that ends as a spike, unless an earlier micro-batch of it has."""
        kept = self.before_retries
        if not kept:
            return
        now, keeps = self.now(), tf.logical_and(retried, tf.equal(kept["loss_scale"], 0.0))
        for field, variable in kept.items():
            replicas.assign_alike(variable, tf.where(keeps, _like(variable, getattr(now, field)), variable))

    def _without_retries(self, state: Any, spike: tf.Tensor) -> Any:
        """The state of a spike as it was before its retries: they must not cost the scale."""
        kept = {field: tf.identity(variable) for field, variable in self.before_retries.items()}
        if not kept:
            return state
        back = tf.logical_and(spike, kept["loss_scale"] > 0.0)
        now = {field: getattr(state, field) for field in kept}
        return state._replace(**{field: tf.where(back, _like(own, kept[field]), own) for field, own in now.items()})

    def move_together(self, event: Event, bad: tf.Tensor, count: Callable[[tf.Tensor], None]) -> None:
        """Lets the strategy see a step, and counts it, once for all replicas; each of them calls it.

        Args:
            event: What it sees.
            bad: Scalar bool, whether the loss of this replica was not finite.
            count: Called likewise, with whether the step was applied: scalar bool.
        """

        def move(event: Event, bad: tf.Tensor) -> None:
            self.move(event, tf.logical_and(bad, tf.logical_not(event.finite)))
            count(tf.equal(tf.identity(self.counts["consecutive_skips"]), 0))

        if tf.distribute.in_cross_replica_context():
            move(event, bad)
        else:
            replicas.merge(lambda s, event, bad: move(_of_all(s, event), replicas.any_of(s, bad)), event, bad)

    def move(
        self, event: Event, of_loss: tf.Tensor, done: tf.Tensor | None = None, when: tf.Tensor | None = None
    ) -> None:
        """As `move_together`, to be called once for all replicas.

        Args:
            event: What it sees.
            of_loss: Scalar bool, whether the step was skipped because its loss was not finite.
            done: A tensor that is there when the step is done.
            when: Scalar bool, whether there was a step. Default: there was.
        """
        if event.norms is not None:
            self.remember_tensors(event.norms.shape[0])
        before = self.now()
        state = after_step(self._strategy, before, event, of_loss)
        moved, guard = event.finite, guard_of(self._strategy)
        if guard is not None:
            spike = guard.is_spike(before, event)
            moved, state = tf.logical_and(moved, tf.logical_not(spike)), self._without_retries(state, spike)
        counts, applied = self.counts, tf.cast(moved, tf.int64)
        step = tf.where(of_loss, tf.constant(1 + _BAD, tf.int64), tf.constant(1, tf.int64))
        skips = (counts["consecutive_skips"] + step) * (1 - applied)
        always = when is None or tf.get_static_value(when)

        def assign(variable: tf.Variable, value: tf.Tensor) -> None:
            replicas.assign_alike(variable, value if always else tf.where(when, value, variable))

        # Nothing below depends on `done` by itself, and a step that fails must not be counted.
        with tf.control_dependencies([] if done is None else [done]):
            for field, variable in (self.fields | self.tensors).items():
                if getattr(state, field) is not getattr(before, field):
                    assign(variable, _like(variable, getattr(state, field)))
            if self.before_retries:
                assign(self.before_retries["loss_scale"], tf.constant(0.0))
            replicas.add_alike(counts["attempted"], step if always else step * tf.cast(when, tf.int64))
            replicas.add_alike(counts["applied"], applied)
            assign(counts["consecutive_skips"], skips)


_BAD = 2**32
"""What a skip because of its loss adds to a count besides 1."""


def _like(own: tf.Variable | tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """A value in the dtype of another: a strategy may count in int32, and variables hold int64."""
    return value if value.dtype == own.dtype else tf.cast(value, own.dtype)


def _of_all(strategy: tf.distribute.Strategy, event: Event) -> Event:
    """What the replicas saw together. The histogram is that of all of them already."""
    histogram = event.histogram if event.histogram is None else replicas.of_each(strategy, event.histogram)[0]
    amax = event.amax if event.amax is None else replicas.largest_of(strategy, event.amax)
    norm = event.norm if event.norm is None else replicas.largest_of(strategy, event.norm)
    loss = event.loss if event.loss is None else replicas.sum_of(strategy, event.loss)
    norms = event.norms
    if norms is not None:
        each = replicas.each(strategy, tf.unstack, norms)
        norms = tf.stack([replicas.largest_of(strategy, one) for one in each])
    return Event(replicas.agreed(strategy, event.finite), amax, histogram, norm, loss, norms)


TENSORS = "_tensor_state"
"""The attribute under which an owner has `tensors`, by which a checkpoint finds them."""
_NOT_PICKLED = ("_type", "_owner", "_save_tensors")
_OF_LENGTH = "restore it into a strategy with the saved length, such as history_length of DelayedAmax"
_OF_TENSORS = "restore it into a run with the saved window, whose steps have as many variables"
