"""A train step of several losses and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.step.again import only_first, taken_again
from loops.step.arguments import computes_in_float16
from loops.step.frozen_weights import models_of
from loops.step.loss_result import loss_and_extra
from loops.step.part_group import Decided, PartGroup
from loops.step.parts import Part, check_composed
from loops.step.turns import Taken, Turns, nothing, taken_if

_OWN = ("loss", "attempted", "applied", "loss_scale", "grad_norm", "clipped_norm", "norm_limit", "loss_limit")


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
    optimizer and what its models moved beside their weights, such as BatchNorm's statistics, keep every bit. Of parts
    that take turns, a skip puts back what its own pass moved in any model of the step. With `loss_scaler=` one scaler
    decides about all parts, and all of them skip if the gradients of any are not finite.

    16-bit variables are trained through float32 master weights, as by a `TrainStep`. A part with `every=n` computes
    nothing in the calls between if the parts take turns; with `forward` its gradients are computed and not used.

    Args:
        parts: At least one `Part`.
        forward: A function of the batch whose result the loss functions share, or None.
        loss_scaler: One scaler for all parts; it needs `forward`. Default: each has its own.
        accumulate: Micro-batches per step, as for a `TrainStep`; more than one need `forward`. `every` counts steps.

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
        loss_scaler: scaler.LossScaler | None = None,
        accumulate: int = 1,
    ):
        super().__init__(name="composed_step")
        check_composed(parts, forward, loss_scaler, accumulate)
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
            PartGroup(each, self.scalers[each[0].name], accumulate, self._state(each), not _states(self.models))
            for each in groups
        ]
        self._turns = Turns(self.accumulate) if any(part.every > 1 for part in parts) else None
        # The scalars that each loss function returned when it was traced last.
        self._extra: dict[str, dict[str, tf.DType]] = {part.name: {} for part in parts}
        self._due_now: dict[str, bool] | None = None

    def __repr__(self) -> str:
        return f"ComposedStep of {', '.join(f'{name}: {one!r}' for name, one in self.scalers.items())}"

    @property
    def weights(self) -> dict[str, Any]:
        """The variables of all parts by name, such as "generator/dense/kernel", in the order of `variable`."""
        return {f"{part.name}/{_path(one)}": one for part in self.parts for one in part.variables}

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
            `clipped_norm`: float32, as of a `TrainStep`; `norm_limit` and `loss_limit` with a `scaler.SpikeGuard`; and
            the scalars that its loss function added. Where it is not a part's turn its norms are NaN, and so are its
            loss and the floats that its function adds, unless `forward` computed them.

            For all of them: `attempted`: bool, whether any decided. `applied`: bool, whether all that did moved.
            `cause`: int32, why the first part that was skipped was, a `scaler.Cause`. `variable`: int32, its variable
            to look at first, as a position in `weights`; -1 if there is none.

        Raises:
            scaler.InvalidArgument: For a part whose loss gives no gradient, and after layers were frozen or unfrozen.
            BadOutputs: If a loss function did not return a scalar, or a scalar and a dict.
        """
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

    def go_back(self, calls: int) -> None:
        """Takes turns as so many calls ago. All other variables are as they are.

        Args:
            calls: How many.
        """
        if self._turns is not None:
            self._turns.go_back(calls)

    @scaler.tracing.as_written
    def _take(self, batch: Any) -> dict[str, tf.Tensor]:
        names = ", ".join(self.scalers)
        self._trainable.keep(
            f"ComposedStep of {names}",
            "Make a new step and new optimizers after setting `trainable`: the masters belong to the step.",
        )
        due = [self._due(part) for part in self.parts]
        outputs: dict[str, tf.Tensor] = {}
        forward = self.forward
        found = self._together(forward, batch, due, outputs) if forward else self._in_turn(batch, due, outputs)
        outputs |= _summed_up(found)
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
        self, forward: Callable[[Any], Any], batch: Any, due: list, outputs: dict
    ) -> list[tuple[int, Decided]]:
        """One forward pass, the gradients of all parts, and then the decisions."""
        before, scales = [group.open() for group in self.groups], self._scales()
        with tf.GradientTape(persistent=True) as tape:
            given = scaler.tracing.as_called(forward)(batch)
            losses = [self._loss(part, given) for part in self.parts]
            scaled = [self._scaled(part, loss) for part, (loss, _) in zip(self.parts, losses, strict=True)]
        taken = {
            part.name: self._taken(part, *loss, tape, one)
            for part, loss, one in zip(self.parts, losses, scaled, strict=True)
        }
        found, start = [], 0
        for group, state in zip(self.groups, before, strict=True):
            turn = due[start]
            own = [taken[part.name] for part in group.parts]
            decided = None if turn is False and not group.window else group.decide(own, state, _when(turn))
            found += [] if decided is None else [(self._first(start), decided)]
            outputs |= self._outputs(group, own, decided, scales)
            start += len(group.parts)
        return found

    def _in_turn(self, batch: Any, due: list, outputs: dict) -> list[tuple[int, Decided]]:
        """The forward pass of a part, its gradients and its decision, and then those of the next."""
        found = []
        for place, (group, turn) in enumerate(zip(self.groups, due, strict=True)):
            scales = self._scales()
            if turn is False:
                outputs |= self._outputs(group, [None], None, scales)
                continue
            before = group.open()
            taken = self._taken_in_turn(group.parts[0], batch, before, turn)
            decided = group.decide([taken], before, _when(turn))
            found.append((self._first(place), decided))
            outputs |= self._outputs(group, [taken], decided, scales)
        return found

    def _taken_in_turn(self, part: Part, batch: Any, before: scaler.Snapshot, turn: tf.Tensor | bool) -> Taken:
        def take() -> Taken:
            may_look_again = turn is True and self._looks_again(part)
            with tf.GradientTape(persistent=may_look_again) as tape:
                loss, extra = self._loss(part, batch)
                scaled = self._scaled(part, loss)
            return self._taken(part, loss, extra, tape, scaled, may_look_again)

        def again(small: tf.Tensor) -> list:
            with tf.GradientTape() as tape:
                loss, _ = self._loss(part, batch)
                scaled = self._share(loss) * loss_scale
            return tape.gradient(scaled, part.variables, output_gradients=small)

        if turn is True:
            return take()
        self._check_no_collectives(part)
        loss_scale, taken = self.scalers[part.name].loss_scale, taken_if(turn, take)
        # The tape of the pass is inside of the branch.
        return taken._replace(again=taken_again(again, before, None) if self._looks_again(part) else None)

    def _loss(self, part: Part, given: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The loss of a part in float32, and the other scalars of its function."""
        loss, extra = loss_and_extra(scaler.tracing.as_called(part.loss_fn)(given), _OWN)
        loss = tf.convert_to_tensor(loss)
        self.scalers[part.name].check_precision(loss, loss)
        loss = tf.cast(loss, tf.float32)
        for penalty in (one for model in part.models for one in getattr(model, "losses", ())):
            loss += tf.cast(penalty, tf.float32)
        extra = {name: tf.convert_to_tensor(value) for name, value in extra.items()}
        self._extra[part.name] = {name: value.dtype for name, value in extra.items()}
        return loss, extra

    def _scaled(self, part: Part, loss: tf.Tensor) -> tf.Tensor:
        return self.scalers[part.name].scale(self._share(loss))

    def _share(self, loss: tf.Tensor) -> tf.Tensor:
        """Of the mean over micro-batches and replicas, whose gradients are summed."""
        return loss / (self.accumulate * tf.distribute.get_strategy().num_replicas_in_sync)

    def _taken(
        self,
        part: Part,
        loss: tf.Tensor,
        extra: dict,
        tape: tf.GradientTape,
        scaled: tf.Tensor,
        may_look_again: bool = True,
    ) -> Taken:
        weights = part.variables
        grads = tape.gradient(scaled, weights)
        if all(grad is None for grad in grads):
            raise scaler.InvalidArgument(
                f"ComposedStep: part {part.name!r} gives no gradient: its loss depends on none of its variables. "
                "Compute it from its own model's predictions, without tf.stop_gradient or NumPy in between."
            )
        if self.accumulate == 1:  # A window checks that each micro-batch has the same gradients.
            self.scalers[part.name].check_connected(grads, weights)

        @scaler.tracing.as_written
        def again(small: tf.Tensor) -> list:
            return tape.gradient(scaled, weights, output_gradients=small)

        may_look_again = may_look_again and self._looks_again(part)
        return Taken(loss, extra, grads, only_first(again) if may_look_again else None)

    def _looks_again(self, part: Part) -> bool:
        """Whether a second look at the gradients may tell why a part is skipped."""
        collective = self._replicas() > 1 and self._synchronizes()
        return self.accumulate == 1 and self.scalers[part.name].may_diagnose() and not collective

    def _check_no_collectives(self, part: Part) -> None:
        if self._replicas() > 1 and self._synchronizes():
            raise scaler.InvalidArgument(
                f"ComposedStep: part {part.name!r} takes its turn at every {part.every}th call, and a "
                "BatchNormalization that synchronises its statistics over replicas cannot be left out of a call. Let "
                "the parts share one forward pass (forward=), or do without synchronized=True."
            )

    def _synchronizes(self) -> bool:
        layers = [layer for model in self.models for layer in scaler.observe.layers_of(model)]
        return any(getattr(layer, "synchronized", False) for layer in layers)

    @staticmethod
    def _replicas() -> int:
        return tf.distribute.get_strategy().num_replicas_in_sync

    def _scales(self) -> dict[str, dict[str, tf.Tensor]]:
        """What the outputs tell of each scaler before the decision."""
        return {name: {"loss_scale": one.loss_scale, **one.spike_limits} for name, one in self.scalers.items()}

    def _outputs(self, group: PartGroup, taken: Sequence[Taken | None], decided: Decided | None, scales: dict) -> dict:
        outputs: dict[str, tf.Tensor] = {}
        for place, (part, one) in enumerate(zip(group.parts, taken, strict=True)):
            no, nan = tf.constant(False), tf.constant(float("nan"))
            outcome = None if decided is None else decided.outcomes[place]
            extra = self._extra[part.name]
            own = {
                "loss": nan if one is None else one.loss,
                "attempted": no if decided is None else decided.attempted,
                "applied": no if outcome is None else outcome.finite,
                "grad_norm": nan if outcome is None else outcome.grad_norm,
                "clipped_norm": nan if outcome is None else outcome.clipped_norm,
                **scales[part.name],
                **{name: nothing(dtype) if one is None else one.extra[name] for name, dtype in extra.items()},
            }
            outputs |= {f"{part.name}/{name}": value for name, value in own.items()}
        return outputs

    def _first(self, place: int) -> int:
        """Where the weights of a part begin among all."""
        return sum(len(part.variables) for part in self.parts[:place])

    def _state(self, group: list[Part]) -> list:
        """What a skip of these parts puts back."""
        kept = [variable for part in self.parts if part not in group for variable in _states(part.own_models)]
        # Parts that take turns are skipped one by one, each with all that its own pass has moved.
        others = {id(variable) for variable in kept} if self.forward else set()
        found = {id(variable): variable for variable in _states(self.models)}
        return [variable for key, variable in found.items() if key not in others]


def _states(models: Sequence[keras.layers.Layer]) -> list:
    return [variable for model in models for variable in scaler.state_of(model)]


def _default(part: Part, scales: bool) -> scaler.LossScaler:
    return scaler.LossScaler(scaler.Dynamic() if scales else scaler.NoScaling(), name=part.name)


def _when(turn: tf.Tensor | bool) -> tf.Tensor | None:
    return None if turn is True else tf.convert_to_tensor(turn)


def _summed_up(found: list[tuple[int, Decided]]) -> dict[str, tf.Tensor]:
    """What all parts did, and the first skip of them."""
    attempted, applied = tf.constant(False), tf.constant(True)
    cause, variable = tf.constant(int(scaler.Cause.NONE)), tf.constant(-1)
    for start, one in reversed(found):
        skipped = tf.logical_and(one.attempted, tf.logical_not(one.applied))
        attempted = tf.logical_or(attempted, one.attempted)
        applied = tf.logical_and(applied, tf.logical_not(skipped))
        cause = tf.where(skipped, one.cause, cause)
        variable = tf.where(skipped, tf.where(one.variable < 0, -1, one.variable + start), variable)
    applied = tf.logical_and(attempted, applied)
    return {"attempted": attempted, "applied": applied, "cause": cause, "variable": variable}


def _path(variable: keras.Variable | tf.Variable) -> str:
    return getattr(variable, "path", None) or variable.name.split(":")[0]
