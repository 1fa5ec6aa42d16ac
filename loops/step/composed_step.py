"""A train step of several losses and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.replica_losses import as_loss, means
from loops.step.arguments import as_loss_scaler, check_composed, check_part_probes, default_scaler
from loops.step.losses import Loss, read_loss
from loops.step.order import Decided, Group, Result, take_step
from loops.step.parts import OwnStep, Part, PartGroup, Turns, changed, layers_in
from loops.step.passes import Role, replicas_meet
from loops.step.probe_rows import free_name
from loops.step.probing import OUTPUTS as PROBED
from loops.step.probing import Probing
from loops.step.user_steps import models_of
from loops.support.errors import BadOutputs

OWN = (
    *("loss", "attempted", "applied", "loss_scale", "grad_norm", "clipped_norm"),
    *("norm_limit", "loss_limit", "clipped_tensors", "retries"),
)
"""What a part returns in any case, with a `scaler.SpikeGuard` or `retry`; its loss function may add others."""


class ComposedStep(OwnStep):
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

    _SETTINGS = ("parts", "forward", "loss_scaler", "accumulate", "retry", "scalers", "optimizers")

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
        if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(one, Part) for one in parts):
            raise scaler.InvalidArgument(f"ComposedStep({parts!r}): expected a list of hs.Part, with at least one.")
        check_composed(parts, forward, loss_scaler, accumulate, retry)
        check_part_probes(probes, parts, retry)
        self.retry = retry
        self.parts, self.forward, self.accumulate = tuple(parts), forward, int(accumulate)
        self.loss_scaler = loss_scaler
        own = [model for part in parts for model in part.own_models]
        named = [model for function in (forward, *(part.loss_fn for part in parts)) for model in models_of(function)]
        self.models = list({id(model): model for model in (*own, *named)}.values())
        self.scalers = {
            part.name: loss_scaler or part.loss_scaler or default_scaler(self.models, part.name) for part in parts
        }
        self.optimizers = {part.name: part.optimizer for part in parts}
        self._trainable = scaler.weights.TrainableSet.of(weight for model in self.models for weight in model.weights)
        groups = [list(parts)] if loss_scaler else [[part] for part in parts]
        self.groups = [
            PartGroup(each, self.scalers[each[0].name], accumulate, *self._state_and_others(each)) for each in groups
        ]
        self._state = scaler.authoring.LayerState(self.models)
        self._turns = Turns(self.accumulate) if any(part.every > 1 for part in parts) else None
        self._probing = {part.name: Probing((probes or {}).get(part.name)) for part in parts}
        # The dtypes of the scalars that each loss function added when it was traced last.
        self._extra: dict[str, dict[str, tf.DType]] = {part.name: {} for part in parts}
        self._due_now: dict[str, bool] | None = None
        made = self._settings_now()
        self._made = lambda: made  # TensorFlow would track a dict.

    def __repr__(self) -> str:
        return f"ComposedStep of {', '.join(f'{name}: {one!r}' for name, one in self.scalers.items())}"

    @property
    def probes(self) -> dict[str, scaler.observe.Watch]:
        """The watch of each part that is measured, by the part's name."""
        return {name: one.watch for name, one in self._probing.items() if one.watch is not None}

    @property
    def sparse_gradients(self) -> dict[str, frozenset[str]]:
        """For each of them the rows of gradients of the type `tf.IndexedSlices`, as of a `TrainStep`."""
        return {name: self._probing[name].sparse for name in self.probes}

    @property
    def weights(self) -> dict[str, Any]:
        """The variables of all parts by name, such as "generator/dense/kernel", in the order of `variable`."""
        found: dict[str, Any] = {}
        for part in self.parts:
            for one in part.variables:
                path = getattr(one, "path", None) or one.name.split(":")[0]
                found[free_name(f"{part.name}/{path}", found)] = one
        return found

    @property
    def master_weights(self) -> list[scaler.MasterWeights]:
        """The float32 masters of the parts with 16-bit variables, and of their teachers."""
        found = [
            masters
            for group in self.groups
            for masters in (*group.masters, *(teacher.masters for teacher in group.teachers if teacher))
        ]
        return [masters for masters in found if masters is not None]

    def names_of_weights(self) -> list[str]:
        """The keys of `weights`."""
        return list(self.weights)

    def owners_of_windows(self) -> list[Any]:
        """The groups."""
        return list(self.groups)

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

    def _layers_now(self) -> dict[str, tuple]:
        """The layers of each part as they are now, and those of other models."""
        made_of = self._made()["parts"]
        own = [model for part in made_of for model in part.own_models]
        layers = {f"the layers of part {part.name!r}": layers_in(part.own_models) for part in made_of}
        known = {id(one) for each in (own, *layers.values()) for one in each}
        others = layers_in(model for model in self.models if id(model) not in known)
        return {**layers, "the layers of other models": tuple(one for one in others if id(one) not in known)}

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
        who = f"ComposedStep of {', '.join(self.scalers)}"
        if changes := changed(self._settings_now(), self._made()):
            raise scaler.InvalidArgument(
                f"{who}: changed since it was made: {', '.join(changes)}. Its parts would go on with what they were "
                "made with. Make a new ComposedStep."
            )
        self._keep_as_traced(
            who, "Make a new step and new optimizers after setting `trainable`: the masters belong to the step."
        )
        for name, probing in self._probing.items():
            probing.check_examples(name, batch)
            probing.build({0: self.accumulate})
        due = {part.name: self._due(part) for part in self.parts}
        results: list[Result] = []
        for groups in [self.groups] if self.forward else [[group] for group in self.groups]:
            results += self._take_together(groups, batch, due)
        outputs: dict[str, tf.Tensor] = {}
        decided, start = [], 0
        for group, result in zip(self.groups, results, strict=True):
            if result.decided is not None:
                decided.append((result.decided, start))
            for part, own in zip(group.parts, result.outputs, strict=True):
                outputs |= {f"{part.name}/{name}": value for name, value in own.items()}
                start += len(part.variables)
        self._state.check(*(one.applied for one, _ in decided))
        outputs |= _summed_up(decided)
        if self.retry:
            retries = [result.retries for result in results if result.retries is not None]
            outputs["retries"] = sum(retries, tf.constant(0, tf.int64))
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

    def _role(self, part: Part, masters: scaler.MasterWeights | None) -> Role:
        return Role(
            part.name,
            self.scalers[part.name],
            part.optimizer,
            part.variables,
            masters,
            part.models,
            lambda given: self._read(part, given),
            f"ComposedStep: part {part.name!r} gives no gradient: its loss depends on none of its variables. "
            "Compute it from its own model's predictions, without tf.stop_gradient or NumPy in between.",
            self._probing[part.name],
            part.clip_norm,
            part.clip,
        )

    def _read(self, part: Part, given: Any) -> Loss:
        """The loss of a part, and the other scalars of its function."""
        taken = (*OWN, *(PROBED if self._probing[part.name].watch else ()))
        found = read_loss(as_loss(part.loss_fn)(given), taken)
        if found.weight is not None:
            raise BadOutputs(
                f"ComposedStep: the loss function of part {part.name!r} returned a WeightedLoss, which only a "
                "TrainStep takes: return a scalar, the mean over the batch."
            )
        loss = tf.convert_to_tensor(found.mean)
        scaler.authoring.check_precision(self.scalers[part.name], loss, loss)
        extra = {name: tf.convert_to_tensor(value) for name, value in found.extra.items()}
        self._extra[part.name] = {name: value.dtype for name, value in extra.items()}
        return found._replace(mean=loss, extra=extra)

    def _take_together(self, groups: Sequence[PartGroup], batch: Any, due: Mapping[str, Any]) -> list[Result]:
        """One forward pass, the gradients of all parts of the groups, and then the decisions."""
        function = self.forward
        now = []
        for group in groups:
            roles = [self._role(part, masters) for part, masters in zip(group.parts, group.masters, strict=True)]
            names = " and ".join(repr(part.name) for part in group.parts)
            no_retry = f"ComposedStep(retry=True): the gradients of {names} {NO_RETRY}" if self.retry else None
            turn = due[group.parts[0].name]
            now.append(Group(roles, group.window, self.accumulate, no_retry, turn=turn, others=group.others))
        turn, part = now[0].turn, groups[0].parts[0]
        if turn is False and not function:
            return [now[0].left_out(self._extra)]
        in_branch = turn is not True and not function
        if in_branch and replicas_meet(self.models):
            raise scaler.InvalidArgument(
                f"ComposedStep: part {part.name!r} takes its turn at every {part.every}th call, and a "
                "BatchNormalization that synchronises its statistics over replicas cannot be left out of a call. Let "
                "the parts share one forward pass (forward=), or do without synchronized=True."
            )
        results = take_step(
            now,
            lambda: as_loss(function)(batch) if function else batch,
            models=self.models,
            state=self._state,
            inputs=batch,
            in_branch=in_branch,
        )
        decided = [(group, result.decided) for group, result in zip(groups, results, strict=True) if result.decided]
        for group, one in decided:
            for teacher, outcome in zip(group.teachers, one.outcomes, strict=True):
                if teacher:
                    teacher.follow(outcome.finite)
        return results

    def _state_and_others(self, group: list[Part]) -> tuple[list, list]:
        """What a skip of these parts puts back, as far as it is known, and what the skips of others do."""
        # Parts that take turns are skipped one by one, each with all that its own pass has moved.
        rest = [part for part in self.parts if part not in group] if self.forward else []
        others = [variable for part in rest for variable in _states(part.own_models)]
        found = {id(variable): variable for variable in _states(self.models)}
        return [variable for key, variable in found.items() if key not in set(map(id, others))], others


def _states(models: Sequence[keras.layers.Layer]) -> list:
    return [variable for model in models for variable in scaler.state_of(model)]


def _summed_up(found: Sequence[tuple[Decided, int]]) -> dict[str, tf.Tensor]:
    """What all parts did, and the first skip of them."""
    attempted, applied = tf.constant(False), tf.constant(True)
    cause, variable = tf.constant(int(scaler.Cause.NONE), tf.int64), tf.constant(-1, tf.int64)
    for one, start in reversed(found):
        skipped = tf.logical_and(one.attempted, tf.logical_not(one.applied))
        attempted = tf.logical_or(attempted, one.attempted)
        applied = tf.logical_and(applied, tf.logical_not(skipped))
        cause = tf.where(skipped, one.cause, cause)
        variable = tf.where(skipped, tf.where(one.variable < 0, one.variable, one.variable + start), variable)
    applied = tf.logical_and(attempted, applied)
    return {"attempted": attempted, "applied": applied, "cause": cause, "variable": variable}


NO_RETRY = (
    "can be taken only once, because the pass calls Python (a tf.py_function), because a BatchNorm synchronises its "
    "statistics over replicas, or because a part with every= draws from tf.random.normal, prints or reads an iterator: "
    "draw from a tf.random.Generator or a keras.random.SeedGenerator, or do without retry."
)
"""Why a step that is traced cannot be retried."""
