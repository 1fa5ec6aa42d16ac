"""What a decision moves beside the weights: the strategy's state and the counters, in variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.packed import Entry, Packed, awaited_shape, scope_of
from scaler.backend.variables import (
    choose,
    either,
    explain_other_shapes,
    mark_owner,
    outside_the_graph,
    owner_of,
    shared_variable,
    when_restored,
)
from scaler.errors import InvalidArgument
from scaler.outcome.stuck import Reading
from scaler.strategies import Event, Strategy
from scaler.strategies.base import (
    after_step,
    as_taken,
    check_state,
    int32_fields,
    only_scale,
    usable_scale,
    usable_scale_on_host,
)
from scaler.strategies.nested import inner_of
from scaler.strategies.spike_guard import TENSOR_FIELDS, guard_of


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

    All float32 fields of the state are in one variable, and all counts in another.

    Attributes:
        floats: The float32 fields as "state.FIELD", and for a guard as "before.FIELD" those before the first retry of
            a step that is not decided yet. Their loss scale is 0 if there was no retry.
        counts: The integer fields likewise, and the counters.
        apart: The variables of fields of another dtype, by name.
        tensors: The variables of the state that have a number for each variable of a step. Empty until the first step
            for a guard that watches each gradient, and always for others.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        state = strategy.init()
        check_state(strategy, state)
        self._type = type(state)
        # Of a variable it is asked for anew: it may be another one by then.
        known = isinstance(getattr(strategy, "initial_scale", None), (int, float))
        self._initial = float(state.loss_scale) if known else None
        fields = {field: tf.convert_to_tensor(value) for field, value in state._asdict().items()}
        self._int32 = int32_fields(fields)
        # How many variables a step has is not known yet.
        later = TENSOR_FIELDS if self._by_tensor else ()
        fields = {field: replicas.on_any_device(value) for field, value in fields.items() if field not in later}
        self.tensors: dict[str, tf.Variable] = {}
        retries = guard_of(strategy) is not None and only_scale(strategy) is None
        self._retried = inner_of(state)._fields if retries else ()
        stored = {f"{_STATE}{field}": value for field, value in fields.items()}
        stored |= {f"{_BEFORE}{field}": tf.zeros_like(fields[field]) for field in self._retried}
        floats, whole = ({k: v for k, v in stored.items() if v.dtype == kind} for kind in _PACKED)
        self.floats = Packed(floats, "loss_scaler_state", shared_variable)
        self.counts = Packed(dict.fromkeys(_COUNTS, tf.constant(0, tf.int64)) | whole, "counts", shared_variable)
        others = {name: value for name, value in stored.items() if value.dtype not in _PACKED}
        self.apart = {name: shared_variable(value, name.replace(".", "_")) for name, value in others.items()}
        self._fields = tuple(fields)

    @property
    def _by_tensor(self) -> bool:
        guard = guard_of(self._strategy)
        return guard is not None and guard.by_tensor is not None

    def belong_to(self, owner: object, on_restored: Callable[[], None]) -> tuple[dict, dict, dict]:
        """Makes `owner` the owner of the variables, and calls `on_restored` after each restore of the counters.

        A deep copy and an unpickled scaler have variables of their own. A shallow copy shares those of the original,
        and is not their owner.

        Args:
            owner: Which variables are found by. Its attribute `TENSORS` becomes `tensors` once there are any.
            on_restored: Called whenever a checkpoint is restored.

        Returns:
            What a checkpoint holds: the fields of the state, the counters, and the state before retries, by name.
        """
        own = (self.floats.variable, self.counts.variable, *self.apart.values())
        if not any(owner_of(variable) is not None for variable in (*own, *self.tensors.values())):
            self._owner = weakref.ref(owner)
            for variable in own:
                mark_owner(variable, owner)
            self._have_tensors_saved()

        def restored() -> None:
            on_restored()
            if self._by_tensor:
                self._make_awaited()

        state = {name: self._entry(_STATE, name) for name in self._fields}
        counts = {name: Entry(self.counts, name, on_restored=restored) for name in _COUNTS}
        if self._owner() is owner:
            when_restored(self.counts.variable, restored)  # Where a checkpoint holds the variable itself.
        return state, counts, {name: self._entry(_BEFORE, name) for name in self._retried}

    def _entry(self, part: str, field: str) -> Entry | tf.Variable:
        key, called = f"{part}{field}", f"{type(self._strategy).__name__}'s {field}"
        packed = next((one for one in (self.floats, self.counts) if key in one.names), None)
        return self.apart[key] if packed is None else Entry(packed, key, called, _OF_LENGTH)

    def _read(self) -> dict[str, tf.Tensor]:
        """All that is stored, by name."""
        apart = {name: tf.identity(variable) for name, variable in {**self.apart, **self.tensors}.items()}
        return {**self.counts.read(), **self.floats.read(), **apart}

    def _assign(self, stored: dict[str, tf.Tensor], when: tf.Tensor | None, before: dict[str, tf.Tensor]) -> None:
        """Assigns on all replicas what has changed; called once for all of them, `when`, scalar bool, is true.

        Args:
            stored: As `_read` returns it.
            when: None for always.
            before: What was there before, likewise.
        """
        changed = {name for name, value in stored.items() if value is not before[name]}
        packed = [one for one in (self.floats, self.counts) if one.names & changed]
        apart = [(one, stored[name]) for name, one in {**self.apart, **self.tensors}.items() if name in changed]
        for variable, value in [*((one.variable, one.joined(stored)) for one in packed), *apart]:
            replicas.assign_alike(variable, value if when is None else choose(when, value, variable))

    def _make_awaited(self) -> None:
        """Makes `tensors` for the values that a checkpoint has of them: saved before a step they would be lost."""
        owner = self._owner()
        if self.tensors or owner is None:
            return
        shape = awaited_shape(owner, TENSORS, TENSOR_FIELDS[1])
        if shape is not None:
            with scope_of(self.counts.variable):
                self.remember_tensors(shape[0])

    def _have_tensors_saved(self) -> None:
        for field, variable in self.tensors.items():
            mark_owner(variable, self._owner())
            explain_other_shapes(variable, f"SpikeGuard's {field}", _OF_TENSORS)
        if self.tensors:
            setattr(self._owner(), TENSORS, self.tensors)

    def remember_tensors(self, count: int) -> None:
        """Makes the variables that have a number for each of `count` variables of a step.

        That is at the first step, or when a checkpoint that has them is restored before it, and gives them its values.

        Raises:
            InvalidArgument: If there are already those of another count.
        """
        if self.tensors:
            known = self.tensors[TENSOR_FIELDS[1]].shape[0]
            if known != count:
                raise InvalidArgument(
                    f"SpikeGuard(by_tensor=...) remembers the norms of {known} gradients, and this step has {count}: "
                    "expected as many at every step, in the same order. Make a new LossScaler for others."
                )
            return
        guard = guard_of(self._strategy)
        assert guard is not None
        with outside_the_graph():
            state = guard.init(count)
            self.tensors = {field: shared_variable(getattr(state, field), field) for field in TENSOR_FIELDS}
            self._have_tensors_saved()

    def __getstate__(self) -> dict:
        # Strategies around others make the class of their state themselves, and pickle does not find it.
        return {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        with tf.init_scope():
            self._type = type(self._strategy.init())

    def now(self) -> Any:
        """The state, with a loss scale that a step may use."""
        return self._state_in(self._read())

    def _state_in(self, stored: Mapping[str, tf.Tensor]) -> Any:
        fields = {name: stored[f"{_STATE}{name}"] for name in self._fields} | {k: stored[k] for k in self.tensors}
        fields = as_taken(self._strategy, fields, self._int32)
        if self._by_tensor and not self.tensors:
            fields |= {field: getattr(self._strategy.init(), field) for field in TENSOR_FIELDS}
        return self._type(**{**fields, "loss_scale": self._usable(fields["loss_scale"])})

    def _usable(self, loss_scale: tf.Tensor) -> tf.Tensor:
        return usable_scale(self._strategy, loss_scale, self._initial)

    def field(self, name: str) -> tf.Tensor:
        """A field as it is stored."""
        return self._read()[f"{_STATE}{name}"]

    def scale_now(self) -> tf.Tensor:
        """The loss scale that a step may use, scalar float32."""
        # Read in any case, which costs nothing where nobody uses it: by this a `Loop` finds the scaler in a step.
        stored, only = tf.identity(self.floats.variable), only_scale(self._strategy)
        # As a constant it takes no operation to multiply by 1, or to divide by it.
        if only is not None:
            return tf.constant(only)
        return self._usable(self.floats.read(stored)[_SCALE])

    def attempted(self) -> tf.Tensor:
        """How many steps were counted, scalar float32: modulo 2^24, up to where that is exact."""
        return tf.cast(self.counts.read()["attempted"] % 2**24, tf.float32)

    def counters(self) -> Counters:
        """The counters as tensors."""
        counts = self.counts.read()
        attempted, applied = counts["attempted"], counts["applied"]
        return Counters(attempted, applied, attempted - applied, counts["consecutive_skips"])

    @property
    def all_counts(self) -> tf.Tensor:
        """All counts as they are stored, for `skipped_since`."""
        return tf.identity(self.counts.variable)

    def skipped_since(self, counts: tf.Tensor) -> tf.Tensor:
        """Whether a step was skipped since then: scalar bool."""
        new = self.counts.read(self.all_counts - counts)
        return new["attempted"] > new["applied"]

    def in_words(self) -> str:
        """The loss scale and the counters, for a person; in eager mode."""
        counts = self.counters()
        return (
            f"loss scale {float(self.scale_now()):g}, {int(counts.applied)} steps applied, "
            f"{int(counts.skipped)} skipped"
        )

    def looked_at(self, *others: tf.Tensor) -> tf.Tensor:
        """What `reading` takes, float64 [6]: the counters, and the loss scale as it is stored. And what others add."""
        counts = tf.identity(self.counts.variable)[: len(_COUNTS)]  # They are its first numbers.
        scale = tf.cast(self.floats.one(_SCALE), tf.float64)
        return tf.concat([tf.cast(counts, tf.float64), tf.stack([scale, *others])], 0)

    def reading(self, *numbers: float) -> Reading:
        """The numbers of `looked_at` on the host, with a loss scale that a step may use."""
        attempted, applied, in_a_row, bad, bad_in_a_row = map(int, numbers[:-1])
        usable = usable_scale_on_host(self._strategy, numbers[-1])
        return Reading(attempted, attempted - applied, in_a_row, usable, bad, bad_in_a_row)

    def read(self) -> Reading:
        """The counters and the loss scale as they are, on the host."""
        return self.reading(*self.looked_at().numpy().tolist())

    def back_off(self, state: Any, retries: tf.Tensor) -> None:
        """Assigns the state after overflows that were retried within a step. Every replica calls it, with the same."""

        def assign(strategy: Any, state: Any, retries: tf.Tensor) -> None:
            after = {name: replicas.local_values(strategy, value)[0] for name, value in state._asdict().items()}
            retried = replicas.local_values(strategy, retries)[0] > 0
            before = self._read()
            stored = before | {
                key: _like(before[key], after[key[len(_STATE) :]]) for key in before if key.startswith(_STATE)
            }
            if self._retried:
                # For a step that ends as a spike, unless an earlier micro-batch of it has overflowed.
                now = self._state_in(before)._asdict()
                first = tf.equal(before[f"{_BEFORE}loss_scale"], 0.0)
                for name in self._retried:
                    kept = before[f"{_BEFORE}{name}"]
                    stored[f"{_BEFORE}{name}"] = choose(first, _like(kept, now[name]), kept)
            self._assign(stored, retried, before)

        replicas.merge(assign, state, retries)

    def _without_retries(self, state: Any, spike: tf.Tensor, stored: Mapping[str, tf.Tensor]) -> Any:
        """The state of a spike as it was before its retries: they must not cost the scale."""
        if not self._retried:
            return state
        kept = {name: stored[f"{_BEFORE}{name}"] for name in self._retried}
        back = tf.logical_and(spike, kept["loss_scale"] > 0.0)
        now = {name: getattr(state, name) for name in kept}
        return state._replace(**{name: choose(back, _like(own, kept[name]), own) for name, own in now.items()})

    def move_together(self, event: Event, bad: tf.Tensor, count: Callable[[tf.Tensor], None]) -> None:
        """Lets the strategy see a step, and counts it, once for all replicas; each of them calls it.

        Args:
            event: What it sees.
            bad: Scalar bool, whether the loss of this replica was not finite.
            count: Called likewise, with whether the step was applied: scalar bool.
        """

        def move(event: Event, bad: tf.Tensor) -> None:
            count(self.move(event, tf.logical_and(bad, tf.logical_not(event.finite))))

        if tf.distribute.in_cross_replica_context():
            move(event, bad)
        else:
            replicas.merge(lambda s, event, bad: move(_of_all(s, event), replicas.any_of(s, bad)), event, bad)

    def move(self, event: Event, of_loss: tf.Tensor, when: tf.Tensor | None = None) -> tf.Tensor:
        """As `move_together`, to be called once for all replicas.

        Args:
            event: What it sees.
            of_loss: Scalar bool, whether the step was skipped because its loss was not finite.
            when: Scalar bool, whether there was a step. Default: there was.

        Returns:
            Whether the step was applied: scalar bool.
        """
        if event.norms is not None:
            self.remember_tensors(event.norms.shape[0])
        event = event._replace(finite=tf.convert_to_tensor(event.finite))
        stored = self._read()
        before = self._state_in(stored)
        state = after_step(self._strategy, before, event, of_loss)
        moved, guard = event.finite, guard_of(self._strategy)
        if guard is not None:
            spike = guard.is_spike(before, event)
            moved = tf.logical_and(moved, tf.logical_not(spike))
            state = self._without_retries(state, spike, stored)
        after = dict(stored)
        for name, key in [*((name, f"{_STATE}{name}") for name in self._fields), *((one, one) for one in self.tensors)]:
            if getattr(state, name) is not getattr(before, name):
                after[key] = _like(stored[key], getattr(state, name))
        if self._retried:
            after[f"{_BEFORE}loss_scale"] = tf.constant(0.0)
        after |= _counted(stored, moved, of_loss)
        always = when is None or tf.get_static_value(when)
        self._assign(after, None if always else when, stored)
        return moved


_STATE, _BEFORE = "state.", "before."
_SCALE = f"{_STATE}loss_scale"
_PACKED = (tf.float32, tf.int64)
_COUNTS = ("attempted", "applied", "consecutive_skips", "bad_losses", "consecutive_bad_losses")
"""What is counted: attempted steps, applied ones, skips in a row, skips because of the loss, and those in a row."""


def _counted(counts: Mapping[str, tf.Tensor], applied: tf.Tensor, of_loss: tf.Tensor) -> dict[str, tf.Tensor]:
    """The counts after a step that was applied, or else skipped, perhaps because of its loss: scalar bools."""
    attempted, moved, in_a_row, bad, bad_in_a_row = (counts[name] for name in _COUNTS)

    def moved_on() -> tuple[tf.Tensor, ...]:
        zero = tf.zeros_like(in_a_row)
        return moved + 1, zero, bad, zero

    def stood_still() -> tuple[tf.Tensor, ...]:
        return moved, in_a_row + 1, *(choose(of_loss, one + 1, one) for one in (bad, bad_in_a_row))

    return dict(zip(_COUNTS, (attempted + 1, *either(applied, moved_on, stood_still)), strict=True))


def _like(own: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """A value in the dtype of another: a strategy may count in int32, and the variable holds int64."""
    return value if value.dtype == own.dtype else tf.cast(value, own.dtype)


def _of_all(strategy: tf.distribute.Strategy, event: Event) -> Event:
    """What the replicas saw together. The histogram is that of all of them already."""
    histogram = event.histogram if event.histogram is None else replicas.local_values(strategy, event.histogram)[0]
    amax = event.amax if event.amax is None else replicas.largest_of(strategy, event.amax)
    norm = event.norm if event.norm is None else replicas.largest_of(strategy, event.norm)
    loss = event.loss if event.loss is None else replicas.sum_of(strategy, event.loss)
    norms = event.norms
    if norms is not None:
        each = replicas.map_replicas(strategy, tf.unstack, norms)
        norms = tf.stack([replicas.largest_of(strategy, one) for one in each])
    return Event(replicas.all_agree(strategy, event.finite), amax, histogram, norm, loss, norms)


TENSORS = "_tensor_state"
"""The attribute under which an owner has `tensors`, by which a checkpoint finds them."""
_NOT_PICKLED = ("_type", "_owner")
_OF_LENGTH = "restore it into a strategy with the saved length, such as history_length of DelayedAmax"
_OF_TENSORS = "restore it into a run with the saved window, whose steps have as many variables"
