"""A train step of several losses and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.replica_losses import means
from loops.step.again import Differentiate
from loops.step.arguments import as_loss_scaler, computes_in_float16
from loops.step.composed_outputs import outputs_of, scales_of, summed_up
from loops.step.fixed import ComposedFixed
from loops.step.frozen_weights import models_of
from loops.step.part_group import Decided, PartGroup, Retried
from loops.step.part_passes import PartPasses
from loops.step.part_probes import PartProbes, check_part_probes
from loops.step.parts import Part, check_composed
from loops.step.turns import Turns


class ComposedStep(tf.Module):
    """A train step of several losses, each of which moves its own variables with its own optimizer.

        step = loops.ComposedStep(
            [
                loops.Part("critic", critic, critic_loss, keras.optimizers.Adam(1e-4)),
                loops.Part("generator", generator, generator_loss, keras.optimizers.Adam(1e-4), every=5),
            ]
        )
        outputs = step(batch)

    Without `forward` the parts take turns, in their order: each loss function is given the batch and computes its own
    forward pass, with the weights as the part before it left them. With `forward` they share one pass: each loss
    function is given what `forward` returned for the batch, and all gradients are taken before any part moves.

    Each part has a loss scaler of its own, and an overflow skips only the part that it is in: its variables, its
    optimizer and the state of the layers that its pass called, such as BatchNorm's statistics, keep every bit. In a
    shared pass the models of other parts are theirs to put back; where it is not their turn, state that is no longer
    finite is put back. With `loss_scaler=` one scaler
    decides about all parts, and all of them skip if the gradients of any are not finite.

    16-bit variables are trained through float32 master weights, as by a `TrainStep`. A part with `every=n` computes
    nothing in the calls between if the parts take turns; with `forward` its gradients are computed and not used.

    Args:
        parts: At least one `Part`.
        forward: A function of the batch whose result the loss functions share, or None.
        loss_scaler: One scaler, or a strategy for one, for all parts; it needs `forward`. Default: each has its own.
        accumulate: Micro-batches per step, as for a `TrainStep`; more than one need `forward`. `every` counts steps.
        retry: Whether scaled backward passes that overflow are repeated in the same step, as in a `TrainStep`: those of
            the part that overflowed, or with one scaler those of all. Random numbers, BatchNorm, metrics and the
            losses are those of the first forward pass. Not on several replicas with a BatchNorm that synchronises its
            statistics.
        probes: What `scaler.observe.watch` returned for the model of a part, by the part's name, such as
            {"critic": scaler.observe.watch(critic)}: measured in the pass of that part, at each of its turns. Of a
            shared pass each part's gradients are those of its own loss. Not with `retry`.

    Attributes:
        parts: The argument.
        scalers: The loss scaler of each part, by name.
        optimizers: The optimizer of each part, by name.
        models: The models and layers of the parts, and those that the functions name.
        groups: The parts by the scaler that decides about them.

    Raises:
        scaler.InvalidArgument: For parts that do not fit together.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        forward: Callable[[Any], Any] | None = None,
        *,
        loss_scaler: scaler.LossScaler | scaler.Strategy | None = None,
        accumulate: int = 1,
        retry: bool = False,
        probes: Mapping[str, scaler.observe.Watch] | None = None,
    ):
        super().__init__(name="composed_step")
        loss_scaler = as_loss_scaler("ComposedStep", loss_scaler)
        check_composed(parts, forward, loss_scaler, accumulate, retry)
        check_part_probes(probes, parts, retry)
        self._probes = PartProbes(probes or {}, int(accumulate))
        self.retry = retry
        self.parts, self.forward, self.accumulate = tuple(parts), forward, int(accumulate)
        self.loss_scaler = loss_scaler
        own = [model for part in parts for model in part.own_models]
        named = [model for function in (forward, *(part.loss_fn for part in parts)) for model in models_of(function)]
        self.models = list({id(model): model for model in (*own, *named)}.values())
        scales = any(computes_in_float16(model) for model in self.models)
        self.scalers = {part.name: loss_scaler or part.loss_scaler or _default(part, scales) for part in parts}
        self.optimizers = {part.name: part.optimizer for part in parts}
        self._trainable = scaler.weights.TrainableSet.of(weight for model in self.models for weight in model.weights)
        groups = [list(parts)] if loss_scaler else [[part] for part in parts]
        self.groups = [
            PartGroup(each, self.scalers[each[0].name], accumulate, *self._state_and_others(each)) for each in groups
        ]
        self._state = scaler.authoring.LayerState(self.models)
        self._turns = Turns(self.accumulate) if any(part.every > 1 for part in parts) else None
        self._passes = PartPasses(dict(self.scalers), list(self.models), self.accumulate, retry, self._probes)
        self._due_now: dict[str, bool] | None = None
        self._fixed = ComposedFixed(self)

    def __repr__(self) -> str:
        return f"ComposedStep of {', '.join(f'{name}: {one!r}' for name, one in self.scalers.items())}"

    @property
    def probes(self) -> dict[str, scaler.observe.Watch]:
        """The watch of each part that is measured, by the part's name."""
        return self._probes.watches

    @property
    def sparse_gradients(self) -> dict[str, frozenset[str]]:
        """For each of them the rows of gradients of the type `tf.IndexedSlices`, as of a `TrainStep`."""
        return {name: one.sparse for name, one in self._probes.probing.items()}

    @property
    def weights(self) -> dict[str, Any]:
        """The variables of all parts by name, such as "generator/dense/kernel", in the order of `variable`."""
        found: dict[str, Any] = {}
        for part in self.parts:
            for one in part.variables:
                name = free = f"{part.name}/{_path(one)}"
                number = 1
                while free in found:
                    number += 1
                    free = f"{name}:{number}"
                found[free] = one
        return found

    @property
    def master_weights(self) -> list[scaler.MasterWeights]:
        """The float32 masters of the parts with 16-bit variables, and of their teachers."""
        found = [masters for group in self.groups for masters in (*group.masters, *group.teachers_masters)]
        return [masters for masters in found if masters is not None]

    def __call__(self, batch: Any) -> dict[str, tf.Tensor]:
        """Takes one (micro-)batch.

        Args:
            batch: Given to `forward`, or to each loss function.

        Returns:
            Scalars. For each part, named as "generator/loss": `loss`, float32, unscaled; `attempted`: bool, whether a
            decision was taken; `applied`: bool, whether its weights moved; `loss_scale`: float32; `grad_norm` and
            `clipped_norm`: float32, as of a `TrainStep`; those of its `scaler.SpikeGuard`, as of a `TrainStep`; with
            `retry` also `retries`: int64, how often its gradients were taken again, and `loss_scale` is that of the
            last time; and the scalars that its loss function added. Where it is not a part's turn its norms are NaN,
            and so are its loss and the floats that its function adds, unless `forward` computed them.

            For all of them: `attempted`: bool, whether any decided. `applied`: bool, whether all that did moved.
            `cause`: int64, why the first part that was skipped was, a `scaler.Cause`. `variable`: int64, its variable
            to look at first, as a position in `weights`; -1 if there is none. `retries`, with `retry`: int64, the sum
            over the scalers.

            With `probes` also the vectors of each part that has a watch, as of a `TrainStep`: "critic/counts",
            "critic/amax" and so on. Where it is not the part's turn both are 0, and all others NaN. In eager mode a
            part that takes its turn has none of them before its first turn.

        Raises:
            scaler.InvalidArgument: For a part whose loss gives no gradient; after layers were frozen or unfrozen, or an
                attribute was set; and, in a compiled function, after layers were added or removed.
            BadOutputs: If a loss function did not return a scalar, or a scalar and a dict.
        """
        with means():
            return self._take(batch)

    def check(self) -> None:
        """Checks the scaler of each part, as `scaler.LossScaler.check` does. A `Loop` does so by itself.

        Raises:
            scaler.StuckError: If the policy of a scaler raises.
            scaler.InvalidArgument: Inside a `tf.function`.
        """
        for one in {id(one): one for one in self.scalers.values()}.values():
            one.check()

    @contextlib.contextmanager
    def retraced(self) -> Iterator[None]:
        """Within this context a step that is traced takes the turns of the next call, without a branch around them."""
        before = self._due_now
        if self._turns is not None:
            self._due_now = {part.name: bool(self._turns.due(part.every)) for part in self.parts}
        try:
            yield
        finally:
            self._due_now = before

    def nearest_turn(self, part: Part) -> int:
        """How many calls lie between the next one and a turn of the part: 0 in its turn, negative for the last one.

        Before its first turn it is the number of calls until then. Called outside of a step, on one replica.

        Args:
            part: One of the parts.
        """
        return 0 if self._turns is None else self._turns.nearest(part.every)

    def go_back(self, calls: int) -> None:
        """Takes turns as so many calls ago. All other variables are as they are.

        Args:
            calls: How many.
        """
        if self._turns is not None:
            self._turns.go_back(calls)

    @scaler.authoring.no_autograph
    def _take(self, batch: Any) -> dict[str, tf.Tensor]:
        names = ", ".join(self.scalers)
        self._trainable.keep(
            f"ComposedStep of {names}",
            "Make a new step and new optimizers after setting `trainable`: the masters belong to the step.",
        )
        self._fixed.keep()
        self._probes.build(batch)
        due = [self._due(part) for part in self.parts]
        outputs: dict[str, tf.Tensor] = {}
        forward = self.forward
        retries: list[tf.Tensor] = []
        if forward:
            found = self._together(forward, batch, due, outputs, retries)
        else:
            found = self._in_turn(batch, due, outputs, retries)
        self._state.check(*(decided.applied for _, decided in found))
        outputs |= summed_up(found) | ({"retries": sum(retries, tf.constant(0, tf.int64))} if self.retry else {})
        if self._turns is not None:
            # A step that fails must not be counted.
            with tf.control_dependencies(list(outputs.values())):
                self._turns.end()
        return outputs

    def _due(self, part: Part) -> tf.Tensor | bool:
        """Whether it is the part's turn, in eager mode as a Python bool."""
        if part.every == 1 or self._turns is None:
            return True
        if self._due_now is not None:
            return self._due_now[part.name]
        due = self._turns.due(part.every)
        return bool(due) if tf.executing_eagerly() else due

    def _together(
        self, forward: Callable[[Any], Any], batch: Any, due: list, outputs: dict, retries: list
    ) -> list[tuple[int, Decided]]:
        """One forward pass, the gradients of all parts, and then the decisions."""
        scales = scales_of(self.scalers, self.retry)
        looks = [self._probes.look(group, due[self.parts.index(group.parts[0])]) for group in self.groups]
        every = {name: look for one in looks for name, look in one.items()}
        # What is traced for a retry calls the layers of a tf.function, which the pass then only repeats.
        with self._state.watched() as moved:
            again = [self._passes.again_together(self.parts, group.parts, forward, batch) for group in self.groups]
            passes = self._passes.together(self.parts, due, forward, batch, every)
        state = moved.snapshot()
        before = [group.before(state) for group in self.groups]
        taken = [[passes[part.name] for part in group.parts] for group in self.groups]
        turns = [due[self.parts.index(group.parts[0])] for group in self.groups]
        # All of them before any part moves, since a retry repeats the forward pass of all.
        retried = [self._retried(*one, retries) for one in zip(self.groups, taken, again, turns, strict=True)]
        found, start = [], 0
        for group, own, kept, turn, last, look in zip(self.groups, taken, before, turns, retried, looks, strict=True):
            decided = None if turn is False and not group.window else group.decide(own, kept, _when(turn), last)
            if decided is None:
                # The pass has moved their state, too.
                kept.restore_unless(tf.constant(True))
            found += [] if decided is None else [(self._first(start), decided)]
            outputs |= outputs_of(group.parts, own, decided, last, scales, self._passes.extra)
            outputs |= self._probes.outputs(group, own, None if turn is False else decided, look, batch)
            start += len(group.parts)
        return found

    def _in_turn(self, batch: Any, due: list, outputs: dict, retries: list) -> list[tuple[int, Decided]]:
        """The forward pass of a part, its gradients and its decision, and then those of the next."""
        found = []
        for place, (group, turn) in enumerate(zip(self.groups, due, strict=True)):
            scales, extra = scales_of(self.scalers, self.retry), self._passes.extra
            if turn is False:
                outputs |= outputs_of(group.parts, [None], None, None, scales, extra)
                outputs |= self._probes.outputs(group, [None], None, {}, batch)
                continue
            part, look = group.parts[0], self._probes.look(group, turn)
            with self._state.watched() as moved:
                again = self._passes.again_in_turn(part, batch)
                taken = self._passes.in_turn(part, batch, turn, again, look.get(part.name))
            before = group.before(moved.snapshot())
            retried = self._retried(group, [taken], again, turn, retries)
            decided = group.decide([taken], before, _when(turn), retried)
            found.append((self._first(place), decided))
            outputs |= outputs_of(group.parts, [taken], decided, retried, scales, extra)
            outputs |= self._probes.outputs(group, [taken], decided, look, batch)
        return found

    def _retried(
        self, group: PartGroup, taken: list, again: Differentiate | None, turn: tf.Tensor | bool, retries: list
    ) -> Retried | None:
        """The gradients of a group after a retry, whose number is added to `retries`; None without one."""
        if not self.retry or turn is False:
            return None
        retried = group.retry(taken, again, turn)
        retries.append(retried.retries)
        return retried

    def _first(self, place: int) -> int:
        """Where the weights of a part begin among all."""
        return sum(len(part.variables) for part in self.parts[:place])

    def _state_and_others(self, group: list[Part]) -> tuple[list, list]:
        """What a skip of these parts puts back, as far as it is known, and what the skips of others do."""
        # Parts that take turns are skipped one by one, each with all that its own pass has moved.
        rest = [part for part in self.parts if part not in group] if self.forward else []
        others = [variable for part in rest for variable in _states(part.own_models)]
        found = {id(variable): variable for variable in _states(self.models)}
        return [variable for key, variable in found.items() if key not in set(map(id, others))], others


def _states(models: Sequence[keras.layers.Layer]) -> list:
    return [variable for model in models for variable in scaler.state_of(model)]


def _default(part: Part, scales: bool) -> scaler.LossScaler:
    return scaler.LossScaler(scaler.Dynamic() if scales else scaler.NoScaling(), name=part.name)


def _when(turn: tf.Tensor | bool) -> tf.Tensor | None:
    return None if turn is True else tf.convert_to_tensor(turn)


def _path(variable: keras.Variable | tf.Variable) -> str:
    return getattr(variable, "path", None) or variable.name.split(":")[0]
