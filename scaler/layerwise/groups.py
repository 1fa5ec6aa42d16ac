"""Loss scales that change along the backward pass: one for each group of layers."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend import replicas
from scaler.backend.autograph import no_autograph
from scaler.backend.variables import shared_variable
from scaler.errors import InvalidArgument
from scaler.gradients import statistics
from scaler.layerwise.adaptive import AdaptiveScale, LayerEvent
from scaler.layerwise.rescaling import MEASURED, measured_rescale, root_mean_square
from scaler.misuse.marks import mark_rescaled, mark_unscaled
from scaler.strategies import Strategy, exact
from scaler.strategies.base import (
    after_step,
    as_taken,
    check_state,
    int32_fields,
    needs_of,
    require_inner,
    usable_scale,
)

_LARGEST = 2.0**60
"""The quotient of two scales, and a float16 number divided by one, are normal float32 numbers then."""


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Names, nearest to the loss first; each one's parent, the next towards the loss; variables and where they are."""

    names: tuple[str, ...]
    parents: tuple[int, ...]
    variables: tuple
    group_of: dict[int, int]


class _Scales(tf.Module):
    """The states of some groups, whose scales one strategy moves, in variables of shape [groups].

    Args:
        strategy: How each scale moves.
        members: The groups' positions among all.

    Raises:
        InvalidArgument: If the strategy needs a histogram, or cannot be inside of another.
    """

    def __init__(self, strategy: Any, members: Sequence[int]):
        super().__init__(name="scales")
        self.strategy, self.members = strategy, tuple(members)
        require_inner(strategy, "Layerwise")
        if needs_of(strategy).edges:
            raise InvalidArgument(
                f"Layerwise(strategy={strategy!r}): it needs a histogram, which is not counted for each group. Take "
                "one that needs nothing or amax, such as hs.Dynamic() or hs.Headroom()."
            )
        first = strategy.init()
        check_state(strategy, first)
        self._type = type(first)
        fields = {field: tf.convert_to_tensor(value) for field, value in first._asdict().items()}
        self._int32 = int32_fields(fields)
        self._state = {
            field: shared_variable(tf.broadcast_to(value[..., None], [*value.shape, len(self.members)]), field)
            for field, value in fields.items()
        }

    @property
    def state(self) -> Any:
        """The strategy's states, a NamedTuple of tensors whose last axis is that of the groups."""
        fields = {field: tf.identity(variable) for field, variable in self._state.items()}
        fields = as_taken(self.strategy, fields, self._int32)
        return self._type(**{**fields, "loss_scale": usable_scale(self.strategy, fields["loss_scale"])})

    def update(self, event: LayerEvent, of_loss: tf.Tensor) -> None:
        """Moves the scales by what was seen of all groups."""
        event = LayerEvent(*(tf.gather(value, self.members) for value in event))
        before = self.state
        after = after_step(self.strategy, before, event, of_loss)
        for field, variable in self._state.items():
            moved = tf.where(event.observed, getattr(after, field), getattr(before, field))
            variable.assign(tf.cast(moved, variable.dtype))


class Layerwise(tf.Module):
    """Scales each group of layers' gradients by a power of two of its own.

        model, layerwise = scaler.layerwise.insert_rescales(model, after=["block_1", "block_2"])
        loss_scaler = scaler.LossScaler(scaler.NoScaling())

        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = loss_scaler.scale(loss)
        grads, seen = layerwise.gradient(tape, scaled, model.trainable_variables)
        outcome = loss_scaler.apply(optimizer, grads, masters)
        layerwise.update(seen)

    The backward pass, from the loss to the input:

        at the end of the group:  g = g * (scale of the group / scale of the group before)     `rescale`
        inside of it:             every gradient carries the group's scale
        afterwards:               a weight's gradient, in float32, is divided by its group's scale, which is exact

    So `LossScaler.apply` gets gradients of the scaled loss, as it would without groups, and all that it promises
    holds. Once a step, each group's scale moves by the strategy on its own; where a group overflows the whole step is
    skipped, since nothing finite comes behind it, but its scale alone is lowered: what it handed on says nothing about
    the groups behind. Where the loss's own gradient is not finite, no group is to blame.

    The group next to the loss has a scale as well, so give the `LossScaler` a strategy that stays, such as `NoScaling`:
    another one would back off at an overflow of any group.

    The loss may depend on the layers through the model's outputs alone. The gradient of a penalty on a weight, or of
    an activation used in the loss, would pass no `rescale` and still be divided: use the optimizer's weight decay
    instead.

    It holds the strategies' states in variables, so `tf.train.Checkpoint(layerwise=layerwise)` saves all of it.

    Args:
        groups: Names and variables of the groups; the one next to the loss first. A layer that is called several
            times belongs to one group with all calls.
        parents: For each group the one whose gradients reach it; the one before, if not given. The first has none.
        strategy: How each scale moves, `AdaptiveScale()` (Zhao et al.) if not given: any strategy, which sees a
            `LayerEvent`, and whose scale is rounded down to a power of two in [2^-60, 2^60]. Or a dict of strategies by
            the names of groups or patterns of them, such as `{"outputs": scaler.Static(1.0), "*": AdaptiveScale()}`: a
            group has the first that fits. DALL-E's blocks
            (Ramesh et al. 2021, appendix D, https://arxiv.org/abs/2102.12092) have `Smooth(2.0**13,
            backoff_factor=2**-0.5, backoff_interval=125, min_scale=2.0**7, max_scale=2.0**24)`. They also set
            non-finite values to zero where they leave a block. That is left out: blocks are told apart without it, and
            it would hide an overflow from `apply`.

    Raises:
        InvalidArgument: If there is no group, a variable is in two groups, a parent does not come first, a strategy
            needs a histogram, no pattern fits a group, or a pattern fits none.

    References:
        Zhao et al. 2019, Adaptive Loss Scaling for Mixed Precision Training (https://arxiv.org/abs/1910.12385).
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence],
        *,
        parents: Mapping[str, str] | None = None,
        strategy: Strategy | Mapping[str, Strategy] | None = None,
        name: str = "layerwise",
    ):
        super().__init__(name=name)
        self._groups = _groups(groups, {} if parents is None else parents)
        self.strategy: Any = AdaptiveScale() if strategy is None else strategy
        with tf.init_scope():
            self._scales = {
                pattern: _Scales(own, members)
                for pattern, (own, members) in _by_pattern(self.strategy, self.names).items()
            }
            self._probes = [tf.Variable(tf.zeros([MEASURED]), name=f"probe_{group}") for group in groups]

    @property
    def names(self) -> tuple[str, ...]:
        """The groups, in the order of `state` and of events."""
        return self._groups.names

    @property
    def groups(self) -> dict[str, tuple[tf.Variable, ...]]:
        """The variables of each group, TensorFlow's own, in the order of `names`."""
        own: dict[str, list[tf.Variable]] = {name: [] for name in self.names}
        for variable in self._groups.variables:
            own[self.names[self._groups.group_of[id(variable)]]].append(variable)
        return {name: tuple(variables) for name, variables in own.items()}

    @property
    def state(self) -> Any:
        """The strategy's states now, a NamedTuple of tensors whose last axis is that of the groups.

        Of several strategies a dict of them by the keys of `strategy`.
        """
        states = {pattern: own.state for pattern, own in self._scales.items()}
        return states if isinstance(self.strategy, Mapping) else states["*"]

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The strategy of each group, in the order of `names`."""
        places = {place: own.strategy for own in self._scales.values() for place in own.members}
        return {name: places[place] for place, name in enumerate(self.names)}

    @property
    def scales(self) -> tf.Tensor:
        """The scale of each group, on top of the loss scale: float32 [groups], powers of two."""
        own = list(self._scales.values())
        found = tf.concat([one.state.loss_scale for one in own], axis=0)
        places = [place for one in own for place in one.members]
        if places != sorted(places):
            found = tf.gather(found, [places.index(place) for place in range(len(places))])
        return exact.power_of_two_at_most(tf.clip_by_value(found, 1 / _LARGEST, _LARGEST))

    @no_autograph
    def rescale(self, x: tf.types.experimental.TensorLike, group: str) -> tf.Tensor:
        """`x` itself, as the end of `group`: it holds what `x` was computed from, not what is computed from `x`.

        Args:
            x: Output of the group, of a floating dtype.
            group: Its name.

        Raises:
            InvalidArgument: For an unknown name.
        """
        if group not in self.names:
            raise InvalidArgument(f"rescale(x, {group!r}): expected one of the groups {', '.join(self.names)}.")
        index = self.names.index(group)

        def factor() -> tf.Tensor:
            # Called in the backward pass, right before `unscale` reads the scales: both see one value.
            mark_rescaled(self, self._groups.variables)
            return (self.scales / self._before(self.scales))[index]

        return measured_rescale(x, self._probes[index], factor)

    @no_autograph
    def gradient(self, tape: tf.GradientTape, scaled: tf.Tensor, variables: Sequence) -> tuple[list, LayerEvent]:
        """Gradients of the scaled loss, without the groups' scales, and what was seen of each group.

        Args:
            tape: It recorded the forward pass.
            scaled: Scalar, from `LossScaler.scale`.
            variables: In any order; each belongs to a group.

        Returns:
            For each variable a float32 tensor, a `tf.IndexedSlices` or None, for `LossScaler.apply`; and what
            `update` takes.

        Raises:
            InvalidArgument: For a variable of no group, or a group that was not rescaled.
        """
        variables = list(variables)
        positions = self._positions(variables)
        grads, reports = tape.gradient(scaled, (variables, list(self._probes)))
        for name, report in zip(self.names, reports, strict=True):
            own = (g for g, at in zip(grads, positions, strict=True) if self.names[at] == name)
            if report is None and any(g is not None for g in own):
                raise InvalidArgument(
                    f"gradient: the gradients of group {name!r} did not pass a rescale. Call "
                    f"layerwise.rescale(x, {name!r}) on what leaves the group, inside the tape; the tape must watch "
                    "variables that are read."
                )
        seen = tf.stack([tf.zeros([MEASURED]) if report is None else report for report in reports])
        derivatives = gradients.derivatives(grads, variables)
        return self.unscale(grads, variables), self._event(derivatives, positions, seen, scaled)

    @no_autograph
    def unscale(self, grads: Sequence[gradients.Gradient], variables: Sequence) -> list[gradients.Gradient]:
        """Each gradient in float32, divided by the scale of its variable's group: exact within float32's range.

        A gradient that is the variable's new value, as of Keras's float8 layers, stays as it is.

        Args:
            grads: Gradients of the scaled loss, of any floating dtype, `tf.IndexedSlices` or None.
            variables: The variable of each.

        Raises:
            InvalidArgument: For a variable of no group.
        """
        mark_unscaled(self)
        scales = tf.unstack(self.scales)
        positions = self._positions(variables)
        return [
            grad if gradients.overwrites(variable) else gradients.divide([grad], scales[at])[0]
            for grad, at, variable in zip(grads, positions, variables, strict=True)
        ]

    @no_autograph
    def update(self, event: LayerEvent) -> None:
        """Moves each group's scale, at the end of a step, whether it was applied or skipped.

        On several replicas each calls it with what it saw, and all scales move by what they saw together: the largest
        magnitude, the smallest deviation of those that saw one, and an overflow on any.
        """
        if not isinstance(event, LayerEvent):
            raise InvalidArgument(
                f"Layerwise.update({_shown(event)}): expected what Layerwise.gradient returned beside the gradients."
            )
        if replicas.replica_count() > 1:
            event = _of_all(event)
        replicas.merge(self._update, *event)

    def _update(self, strategy: tf.distribute.Strategy, *event: tf.Tensor) -> None:
        event = LayerEvent(*(replicas.local_values(strategy, value)[0] for value in event))
        of_loss = tf.logical_not(tf.reduce_all(tf.logical_or(event.finite, event.loss_finite)))
        for own in self._scales.values():
            own.update(event, of_loss)

    def _event(self, grads: Sequence, positions: Sequence[int], seen: tf.Tensor, scaled: tf.Tensor) -> LayerEvent:
        """From this step's gradients, what each group's probe reported, and the scaled loss."""
        scales, (entering, spread, rescaled) = self.scales, tf.unstack(seen, axis=1)
        before = self._before(scales)
        amax, deviation = [], []
        for group, scale in enumerate(tf.unstack(scales)):
            own = [grad for grad, at in zip(grads, positions, strict=True) if at == group and grad is not None]
            largest = statistics.amax(own)
            values = [tf.reshape(tf.cast(gradients.values_of(grad), tf.float32), [-1]) for grad in own]
            leaving = [child for child, parent in enumerate(self._groups.parents) if parent == group]
            inside = tf.stack([largest, *(entering[child] for child in leaving)]) / scale
            spreads = [spread[child] / scale for child in leaving]
            if values:
                spreads.append(root_mean_square(tf.concat(values, axis=0), largest) / scale)
            # What enters is known at the scale before, even where this group's makes it zero.
            amax.append(tf.maximum(tf.reduce_max(inside), entering[group] / before[group]))
            deviation.append(tf.reduce_min(tf.stack([spread[group] / before[group], *spreads])))
        finite = tf.logical_and(tf.math.is_finite(tf.stack(amax)), tf.math.is_finite(rescaled))
        return LayerEvent(
            finite=finite,
            amax=tf.where(finite, tf.stack(amax), float("inf")),
            deviation=tf.stack(deviation),
            entering=entering / before,
            observed=tf.logical_and(entering > 0.0, tf.math.is_finite(entering)),
            loss_finite=tf.math.is_finite(tf.stack([scaled] * len(amax))),
        )

    def _before(self, scales: tf.Tensor) -> tf.Tensor:
        """The scale that gradients carry when they reach each group."""
        above = [parent + 1 for parent in self._groups.parents]
        return tf.gather(tf.concat([[1.0], scales], axis=0), tf.constant(above, tf.int64))

    def _positions(self, variables: Sequence) -> list[int]:
        for variable in variables:
            if id(replicas.native(variable)) not in self._groups.group_of:
                raise InvalidArgument(
                    f"variable {getattr(variable, 'path', variable.name)!r} belongs to none of the groups "
                    f"{', '.join(self.names)}: give it to the group whose rescale its gradient passes."
                )
        return [self._groups.group_of[id(replicas.native(variable))] for variable in variables]


def _of_all(event: LayerEvent) -> LayerEvent:
    """What all replicas saw together."""
    event = event._replace(deviation=tf.where(event.observed, event.deviation, float("inf")))
    numbers = tf.stack([tf.cast(value, tf.float32) for value in event])
    each = tf.distribute.get_replica_context().all_gather(numbers[tf.newaxis], axis=0)
    each = tf.ensure_shape(each, [None, *numbers.shape])
    least = LayerEvent(*tf.unstack(tf.reduce_min(each, axis=0)))
    most = LayerEvent(*tf.unstack(tf.reduce_max(each, axis=0)))
    return least._replace(
        finite=least.finite > 0.0,
        amax=most.amax,
        entering=most.entering,
        observed=tf.logical_and(most.observed > 0.0, tf.math.is_finite(most.entering)),
        loss_finite=least.loss_finite > 0.0,
    )


def _groups(groups: Mapping[str, Sequence], parents: Mapping[str, str]) -> _Groups:
    if not isinstance(groups, Mapping) or not all(isinstance(name, str) for name in groups):
        raise InvalidArgument(
            f"Layerwise({_shown(groups)}): expected a dict of lists of variables by the names of their groups, the one "
            'next to the loss first, such as {"head": head.variables, "body": body.variables}.'
        )
    names, kept = tuple(groups), []
    group_of: dict[int, int] = {}
    if not names:
        raise InvalidArgument("Layerwise({}): expected at least one group of variables.")
    if not isinstance(parents, Mapping) or not set(parents) <= set(names[1:]):
        raise InvalidArgument(
            f"Layerwise(parents={_shown(parents)}): expected a dict of names by the names of groups, of any but the "
            f"first: {', '.join(names[1:]) or 'there is no other'}."
        )
    for index, (name, variables) in enumerate(groups.items()):
        if not isinstance(variables, Sequence) or not all(hasattr(one, "assign") for one in variables):
            raise InvalidArgument(f"Layerwise: group {name!r} is {_shown(variables)}: expected a list of variables.")
        for variable in map(replicas.native, variables):
            if group_of.setdefault(id(variable), index) != index:
                raise InvalidArgument(
                    f"variable {variable.name!r} is in group {names[group_of[id(variable)]]!r} and in {name!r}: its "
                    "gradient would be a sum at two scales. Put all layers that use it in one group."
                )
            kept.append(variable)
    found = [-1]
    for index, name in enumerate(names[1:], start=1):
        parent = parents.get(name, names[index - 1])
        if parent not in names[:index]:
            raise InvalidArgument(f"the parent of group {name!r} is {parent!r}: expected one of {names[:index]}.")
        found.append(names.index(parent))
    return _Groups(names, tuple(found), tuple(kept), group_of)


def _by_pattern(strategy: Any, names: Sequence[str]) -> dict[str, tuple[Any, list[int]]]:
    """Each strategy, with the positions of its groups, by its pattern."""
    if not isinstance(strategy, Mapping):
        return {"*": (strategy, list(range(len(names))))}
    keys = "{" + ", ".join(f"{key!r}: ..." for key in strategy) + "}"
    if not strategy or not all(isinstance(pattern, str) for pattern in strategy):
        raise InvalidArgument(
            f"Layerwise(strategy={keys}): expected a strategy, or a dict of strategies by the names of groups or "
            'patterns of them, such as {"outputs": hs.Static(1.0), "*": hs.Dynamic()}.'
        )
    first = {name: next((one for one in strategy if fnmatch.fnmatchcase(name, one)), "") for name in names}
    left = [name for name in names if first[name] not in strategy]
    unused = [pattern for pattern in strategy if pattern not in first.values()]
    if left or unused:
        what = f"group {left[0]!r} fits none of its keys" if left else f"{unused[0]!r} is the first key of no group"
        raise InvalidArgument(
            f"Layerwise(strategy={keys}): {what}. Expected a strategy for each of the groups {', '.join(names)}: add "
            "'*' as the last key for all others, or leave out what fits none."
        )
    # In the order of the groups: a checkpoint of the same strategies fits whatever order the dict has.
    return {
        pattern: (strategy[pattern], [place for place, name in enumerate(names) if first[name] == pattern])
        for pattern in dict.fromkeys(first.values())
    }


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
