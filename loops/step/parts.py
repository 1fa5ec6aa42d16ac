"""The parts of a `ComposedStep`: what each moves, when it is its turn, who decides about it, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.step.accumulation import MicroBatches, local_variable
from loops.step.arguments import as_loss_scaler, as_optimizer, check_optimizer, has_16bit
from loops.step.teachers import Teacher, check_teacher
from loops.support.checks import check_count


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """What one optimizer of a `ComposedStep` moves, and the loss that moves it.

    Args:
        name: A Python identifier. The part's outputs begin with it, as "generator/loss".
        model: What the optimizer moves: a built Keras model or layer, of which it moves the trainable variables; a
            variable; or a list of these.
        loss_fn: A function of what the step's `forward` returned, or of the batch if the step has none. It returns a
            scalar, the mean over the examples it is given, or a scalar and a dict of further scalars, which the step
            returns, too. The own losses of `model`, such as weight regularisation, are added.
        optimizer: A Keras optimizer, its name as for Keras's `compile`, or a function `(grads, variables) -> None`.
        loss_scaler: Scales the loss and decides about this part; or a strategy, for a scaler of its own. Default: one
            that scales by `scaler.Dynamic()` if any model of the step computes in float16, and else not at all.
        every: The part takes its turn at each call whose number, from 1, is a multiple of `every`.
        clip_norm: Largest global norm of the part's unscaled gradients, or None.
        clip: `scaler.ClipByNorm(1.0)` or `scaler.ClipByValue(1.0)` instead of `clip_norm`, or None.
        teacher: A model built like `model`, whose weights follow as an exponential moving average, in float32, or in
            float64 for float64 weights: wherever the part was applied they become
            `momentum * teacher + (1 - momentum) * model`. Give both the same weights first:
            `teacher.set_weights(model.get_weights())`.
        momentum: How much of the teacher stays at each step.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    name: str
    model: Any
    loss_fn: Callable[[Any], Any]
    optimizer: Any
    _: dataclasses.KW_ONLY
    loss_scaler: scaler.LossScaler | None = None
    every: int = 1
    clip_norm: float | None = None
    clip: scaler.ClipByNorm | scaler.ClipByValue | None = None
    teacher: keras.Model | None = None
    momentum: float = 0.999

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise scaler.InvalidArgument(
                f"Part(name={self.name!r}): expected a name like a Python variable's, such as 'generator'."
            )
        who = f"Part {self.name!r}"
        for one in self._given():
            if isinstance(one, keras.layers.Layer) and not one.built:
                raise scaler.InvalidArgument(
                    f"{who}: {one.name!r} is not built, so that its variables are not known: call it on a batch, or "
                    "call its build(shape), before the part is made."
                )
            if not isinstance(one, (keras.layers.Layer, keras.Variable, tf.Variable)):
                raise scaler.InvalidArgument(
                    f"{who}: model={one!r}: expected a Keras model or layer, a variable, or a list of these."
                )
        if not self.variables:
            raise scaler.InvalidArgument(f"{who}: its model has no trainable variables.")
        if not callable(self.loss_fn):
            raise scaler.InvalidArgument(f"{who}: loss_fn={self.loss_fn!r}: expected a function.")
        object.__setattr__(self, "loss_scaler", as_loss_scaler(who, self.loss_scaler, self.name))
        check_count(f"{who}: every={self.every!r}", self.every)
        check_teacher(who, self.teacher, self.model, self.momentum)
        object.__setattr__(self, "optimizer", as_optimizer(who, self.optimizer))
        scaler.authoring.check_arguments(self.optimizer, clip_norm=self.clip_norm, clip=self.clip)

    def _given(self) -> list:
        return list(self.model) if isinstance(self.model, (list, tuple)) else [self.model]

    @property
    def models(self) -> list[keras.layers.Layer]:
        """The models and layers in `model`."""
        return [one for one in self._given() if isinstance(one, keras.layers.Layer)]

    @property
    def own_models(self) -> list[keras.layers.Layer]:
        """The same and the teacher: what no other part puts back."""
        return self.models if self.teacher is None else [*self.models, self.teacher]

    @property
    def variables(self) -> list:
        """The variables that the optimizer moves."""
        found: list = []
        for one in self._given():
            found += one.trainable_variables if isinstance(one, keras.layers.Layer) else [one]
        return list({id(variable): variable for variable in found}.values())


class Turns(tf.Module):
    """Counts the calls of a step, and tells whose turn it is.

    Each replica counts by itself. A checkpoint holds the count, so that a resumed run goes on in the middle of a turn.

    Args:
        window: Calls that make one step.
    """

    def __init__(self, window: int):
        super().__init__(name="turns")
        self._window = window
        with tf.init_scope():
            self._calls = local_variable(tf.constant(0, tf.int64), "calls")

    def due(self, every: int) -> tf.Tensor:
        """Whether it is the turn of a part in this call, scalar bool."""
        return tf.equal((self._calls // self._window + 1) % every, 0)

    def nearest(self, every: int) -> int:
        """How many calls from the next one it is to a part's turn: 0 in its turn, else back to the last one.

        Before the first turn it is the number of calls until then. Called outside of a step, on one replica.
        """
        calls = int(self._calls)
        step = calls // self._window + 1
        if step % every == 0:
            return 0
        return (step // every * every or every) * self._window - 1 - calls

    def go_back(self, calls: int) -> None:
        """As if so many calls had not been, on every replica; called outside of a step."""
        for part in getattr(self._calls, "values", (self._calls,)):
            part.assign_sub(calls)

    def end(self) -> None:
        """Counts this call."""
        self._calls.assign_add(1)


class PartGroup(tf.Module):
    """Parts about which one loss scaler decides: one alone, or all of a step.

    Args:
        parts: The parts.
        loss_scaler: Their scaler.
        accumulate: Micro-batches per step.
        state: State of layers that is put back if the parts are skipped, as far as it is known beforehand.
        others: The state that other groups put back.

    Attributes:
        parts: The argument.
        loss_scaler: The argument.
        weights: The variables that each part moves.
        masters: The masters of each part, or None.
        teachers: The teacher of each part, or None.
        window: The sums of all of them, or None.
        others: The ids of the state that other groups put back.
    """

    def __init__(
        self, parts: Sequence[Part], loss_scaler: scaler.LossScaler, accumulate: int, state: list, others: list
    ):
        super().__init__(name="part_group")
        self.parts, self.loss_scaler = list(parts), loss_scaler
        self.weights = [part.variables for part in parts]
        self.others = frozenset(map(id, others))
        self.masters = [scaler.MasterWeights(one) if has_16bit(one) else None for one in self.weights]
        self.teachers = [
            part.teacher and Teacher(part.teacher, part.model, masters, part.momentum)
            for part, masters in zip(self.parts, self.masters, strict=True)
        ]
        flat = [variable for weights in self.weights for variable in weights]
        self.window = MicroBatches({0: accumulate}, flat, state) if accumulate > 1 else None

    def follow(self, outcomes: Sequence[scaler.Outcome]) -> None:
        """Has each teacher follow the part that has one, where it was applied."""
        for teacher, outcome in zip(self.teachers, outcomes, strict=True):
            if teacher:
                teacher.follow(outcome.finite)


class OwnStep(tf.Module):
    """A train step of this package, and what others ask of it.

    Attributes:
        parts: Those of a `ComposedStep`. A `TrainStep` has none, and its outputs have no part's name.
    """

    parts: Sequence[Part] = ()

    def owners_of_windows(self) -> list[Any]:
        """What may sum micro-batches, in an attribute `window`."""
        raise NotImplementedError

    def names_of_weights(self) -> list[str]:
        """The names of all weights, in the order of the output `variable`."""
        raise NotImplementedError

    def retraced(self) -> contextlib.AbstractContextManager[None]:
        """Within this context a step that is traced takes what the next call takes, as it is now."""
        raise NotImplementedError

    def go_back(self, calls: int) -> None:
        """Takes turns as so many calls ago, where parts take turns. All other variables are as they are."""


def parts_in(train_step: object) -> Sequence[Part]:
    """The parts of a `ComposedStep`; none of any other train step."""
    return train_step.parts if isinstance(train_step, OwnStep) else ()


def check_composed(parts: Any, forward: Any, loss_scaler: Any, accumulate: Any, retry: Any) -> None:
    """Refuses parts that do not fit together.

    Raises:
        scaler.InvalidArgument: With the names of the parts.
    """
    if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(one, Part) for one in parts):
        raise scaler.InvalidArgument(f"ComposedStep({parts!r}): expected a list of hs.Part, with at least one.")
    if forward is not None and not callable(forward):
        raise scaler.InvalidArgument(f"ComposedStep(forward={forward!r}): expected a function of a batch.")
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise scaler.InvalidArgument(f"ComposedStep: the parts are named {', '.join(names)}: expected different names.")
    _refuse_shared(parts, "the variable", lambda part: part.variables)
    _refuse_shared(parts, "the optimizer", lambda part: [part.optimizer])
    _refuse_shared(parts, "the loss scaler", lambda part: [part.loss_scaler] if part.loss_scaler else [])
    _refuse_moved_teachers(parts)
    check_count(f"ComposedStep(accumulate={accumulate!r})", accumulate)
    if not isinstance(retry, bool):
        raise scaler.InvalidArgument(f"ComposedStep(retry={retry!r}): expected True or False.")
    if accumulate > 1 and forward is None:
        raise scaler.InvalidArgument(
            f"ComposedStep(accumulate={accumulate!r}): parts that take turns have no window in common, since each sees "
            "what the one before it has moved. Let them share one forward pass: forward=."
        )
    if loss_scaler is not None:
        _check_one_scaler(parts, forward, loss_scaler)
    for part in parts:
        check_optimizer(f"ComposedStep: part {part.name!r}", part.optimizer, loss_scaler or part.loss_scaler)


def _check_one_scaler(parts: Sequence[Part], forward: Any, loss_scaler: Any) -> None:
    """Refuses one scaler for all parts where they cannot be decided about together."""
    own = [part.name for part in parts if part.loss_scaler is not None]
    turns = [part.name for part in parts if part.every > 1]
    if forward is None:
        why = "parts that take turns are decided about one after the other. Let them share one forward pass: forward=."
    elif own:
        why = f"part {own[0]!r} has a loss scaler of its own: expected one for all, or one for each."
    elif turns:
        why = f"part {turns[0]!r} takes its turn at some calls only: expected every=1 in all, or a scaler for each."
    elif isinstance(loss_scaler.strategy, scaler.SpikeGuard):
        why = "a SpikeGuard looks at the steps of one optimizer. Give each part a scaler of its own."
    else:
        return
    raise scaler.InvalidArgument(f"ComposedStep(loss_scaler=...): one scaler decides about all parts together; {why}")


def _refuse_moved_teachers(parts: Sequence[Part]) -> None:
    """Refuses a teacher that an optimizer moves, or that follows two students."""
    follows: dict[int, str] = {}
    for part in parts:
        for variable in [] if part.teacher is None else part.teacher.weights:
            mover = next((one.name for one in parts if any(own is variable for own in one.variables)), None)
            mover = mover or follows.get(id(variable))
            if mover is not None:
                raise scaler.InvalidArgument(
                    f"ComposedStep: the teacher of part {part.name!r} is moved by part {mover!r}, too: expected a "
                    "model of its own."
                )
        follows |= {} if part.teacher is None else {id(variable): part.name for variable in part.teacher.weights}


def _refuse_shared(parts: Sequence[Part], what: str, of: Callable[[Part], Iterable]) -> None:
    owners: dict[int, str] = {}
    for part in parts:
        for one in of(part):
            if owners.setdefault(id(one), part.name) != part.name:
                name = getattr(one, "path", None) or getattr(one, "name", None) or type(one).__name__
                raise scaler.InvalidArgument(
                    f"ComposedStep: {what} {name!r} is in the parts {owners[id(one)]!r} and {part.name!r}: expected "
                    "it in one of them."
                )


def check_part_probes(probes: Any, parts: Sequence[Part], retry: bool) -> None:
    """Refuses watches that do not belong to the parts.

    Args:
        probes: The argument of `ComposedStep`.
        parts: Its parts.
        retry: Its argument.

    Raises:
        scaler.InvalidArgument: With the name of the part.
    """
    if probes is None:
        return
    names = [part.name for part in parts]
    if not isinstance(probes, Mapping) or not probes or not set(probes) <= set(names):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes={probes!r:.100}): expected a dict of hs.observe.watch(model) by the names of "
            f"parts, of which there are {', '.join(names)}."
        )
    if retry:
        raise scaler.InvalidArgument(
            "ComposedStep(retry=True, probes=...): probes measure the first backward pass and not the one that is "
            "applied. Use one of the two."
        )
    owners: dict[int, str] = {}
    for part in parts:
        if part.name in probes:
            _check_watch(part, probes[part.name])
            other = owners.setdefault(id(probes[part.name]), part.name)
            if other != part.name:
                raise scaler.InvalidArgument(
                    f"ComposedStep(probes=...): the parts {other!r} and {part.name!r} have one watch, whose rows are "
                    "those of one part: expected an hs.observe.watch(...) for each."
                )


def _check_watch(part: Part, watch: Any) -> None:
    if not isinstance(watch, scaler.observe.Watch):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes=...): part {part.name!r} has {watch!r:.100}: expected hs.observe.watch(model)."
        )
    held = {id(variable) for variable in watch.model.variables}
    if not any(id(variable) in held for variable in part.variables):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes=...): part {part.name!r} has a watch of model {watch.model.name!r}, which has none "
            "of the variables that this part moves: expected a watch of a Keras model that has some."
        )
