"""The parts of a `ComposedStep`: what each moves, when it is its turn, who decides about it, and its teacher."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import held_by, layers_now, native
from loops.step.accumulation import MicroBatches, local_variable
from loops.step.arguments import as_loss_scaler, as_optimizer, has_16bit
from loops.support.errors import check_count


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
        scaler.authoring.check_arguments(self.optimizer, clip_norm=self.clip_norm, clip=self.clip, who=who)

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


_Fixed = dict[str, tuple]
"""What a step is made of, by name: objects, which stay alive so that no other one gets their place, and numbers."""


class OwnStep(tf.Module):
    """A train step of this package: what others ask of it, and what its trace has fixed.

    Attributes:
        parts: Those of a `ComposedStep`. A `TrainStep` has none, and its outputs have no part's name.
    """

    parts: Sequence[Part] = ()
    _SETTINGS: tuple[str, ...]
    """The names of the attributes that a trace has fixed."""
    _trainable: scaler.weights.TrainableSet

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

    def _layers_now(self) -> _Fixed:
        """The layers of its models, by what to call them."""
        raise NotImplementedError

    def _settings_now(self) -> _Fixed:
        return {name: _as_tuple(getattr(self, name)) for name in self._SETTINGS}

    def _keep_as_traced(self, who: str, advice: str) -> None:
        """Refuses changes at later calls of the function that is being traced, which would be ignored.

        Args:
            who: The class and name of the step, for the sentence.
            advice: What to create again when other weights are to be trained, as a sentence.

        Raises:
            scaler.InvalidArgument: With what was changed.
        """
        self._trainable.keep(who, advice)
        layers, kind = self._layers_now(), who.partition(" ")[0]
        traced = {**layers, **self._settings_now()}
        known, settings = tuple(itertools.chain(*layers.values())), operator.attrgetter(*self._SETTINGS)
        # TensorFlow wraps a dict, and takes long over its values.
        parts = [getattr(one, "__wrapped__", one) for one in settings(self) if isinstance(one, (dict, list))]

        def ids() -> tuple:
            """What counts, by its ids: quick to ask for before each call. An equal number may have another one."""
            inside = [tuple(map(id, _as_tuple(one))) for one in parts]
            return held_by(known), tuple(map(id, settings(self))), inside

        def check(_: tuple) -> None:
            changes = changed({**self._layers_now(), **self._settings_now()}, traced)
            if changes:
                raise scaler.InvalidArgument(
                    f"{who}: changed since it was traced: {', '.join(changes)}. Its compiled function would go on with "
                    f"what it was traced with. Make a new {kind}, and a new Loop or tf.function around it."
                )

        scaler.authoring.at_each_call(ids, check, ("fixed", id(self)))


def changed(now: _Fixed, before: _Fixed) -> list[str]:
    """The names of what is not the same any more: another object, or another number. And which layers came or went."""
    then, here = (
        {name: tuple(one if isinstance(one, (int, float)) else id(one) for one in own) for name, own in each.items()}
        for each in (before, now)
    )
    return [name + _layers_between(before[name], now.get(name, ())) for name in then if then[name] != here.get(name)]


def _layers_between(before: tuple, now: tuple) -> str:
    """Which layers went and came, in brackets; nothing where none did."""
    moved = [("without", before, set(map(id, now))), ("with", now, set(map(id, before)))]
    told = []
    for how, own, others in moved:
        layers = [one for one in own if isinstance(one, keras.layers.Layer) and id(one) not in others]
        if layers:
            told.append(f"{how} {', '.join(dict.fromkeys(repr(one.name) for one in layers))}")
    return f" ({', '.join(told)})" if told else ""


def _as_tuple(setting: Any) -> tuple:
    if not isinstance(setting, (dict, list, tuple)):
        return (setting,)
    return tuple(setting.values() if isinstance(setting, dict) else setting)


def layers_in(models: Iterable[keras.layers.Layer]) -> tuple:
    """Models and the layers in them now."""
    return tuple(layer for model in models for layer in layers_now(model))


def parts_in(train_step: object) -> Sequence[Part]:
    """The parts of a `ComposedStep`; none of any other train step."""
    return train_step.parts if isinstance(train_step, OwnStep) else ()


class Teacher(tf.Module):
    """A model that follows another one of the same shape, in float32; float64 weights in float64.

        teacher = momentum * teacher + (1 - momentum) * student

    All floating-point weights follow, BatchNorm's statistics too. 16-bit weights of the teacher have float32 copies: an
    average in 16 bits would stand still near its goal. Those of the student are read from its masters. The scales and
    histories of float8 layers, which take their gradient as their value, are copied: an average of largest values is
    too small for the largest.

    Args:
        teacher: A built model.
        student: A built model or layer with weights of the same shapes.
        masters: The student's, or None.
        momentum: How much of the teacher stays.
    """

    def __init__(self, teacher: keras.Model, student: Any, masters: scaler.MasterWeights | None, momentum: float):
        super().__init__(name="teacher")
        self._momentum = momentum
        pairs = [pair for pair in zip(teacher.weights, student.weights, strict=True) if is_floating(pair[0])]
        wide = dict(zip(map(id, masters.model_variables), masters.weights, strict=True)) if masters else {}
        self._students = [wide.get(id(variable), variable) for _, variable in pairs]
        own = [variable for variable, _ in pairs]
        self._copied = [scaler.gradients.overwrites(student) for _, student in pairs]
        narrow = any(variable.dtype in ("float16", "bfloat16") for variable in own)
        self.masters = scaler.MasterWeights(own, name="teacher_weights") if narrow else None
        self._own = self.masters.weights if self.masters else own

    @scaler.authoring.no_autograph
    def follow(self, applied: tf.Tensor) -> None:
        """Takes one step towards the student where it was applied, scalar bool; else keeps every bit."""

        def moved(own: tf.Tensor, student: tf.Tensor, applied: tf.Tensor, share: float) -> tf.Tensor:
            wide = tf.float64 if own.dtype == tf.float64 else tf.float32
            stays, now, goal = tf.constant(share, wide), tf.cast(own, wide), tf.cast(student, wide)
            return tf.where(applied, tf.cast(stays * now + (1.0 - stays) * goal, own.dtype), own)

        @scaler.authoring.no_forward_pass()
        def assign(strategy: tf.distribute.Strategy, students: list, applied: Any) -> None:
            if self.masters:
                self.masters.refresh()
            for variable, student, copied in zip(self._own, students, self._copied, strict=True):
                share = 0.0 if copied else self._momentum
                strategy.extended.update(
                    native(variable),
                    lambda own, goal, applied, share=share: own.assign(
                        moved(tf.convert_to_tensor(own), goal, applied, share)
                    ),
                    args=(student, applied),
                )
            if self.masters:
                self.masters.write()

        students = [tf.convert_to_tensor(variable) for variable in self._students]
        tf.distribute.get_replica_context().merge_call(scaler.authoring.no_autograph(assign), args=(students, applied))


def is_floating(variable: Any) -> bool:
    """Whether it follows: seeds and counters do not."""
    return tf.as_dtype(variable.dtype).is_floating


def check_teacher(who: str, teacher: Any, student: Any, momentum: Any) -> None:
    """Refuses a teacher that cannot follow.

    Args:
        who: The start of the sentence.
        teacher: The argument of `Part`.
        student: Its argument `model`.
        momentum: The argument of `Part`.
    """
    if not isinstance(momentum, float) or not 0.0 <= momentum < 1.0:
        raise scaler.InvalidArgument(f"{who}: momentum={momentum!r}: expected a float from 0.0 up to, not with, 1.0.")
    if teacher is None:
        return
    if not isinstance(teacher, keras.layers.Layer) or not isinstance(student, keras.layers.Layer):
        raise scaler.InvalidArgument(
            f"{who}: teacher={teacher!r}: expected a built Keras model for a part whose `model` is one model as well."
        )
    shapes = [[tuple(variable.shape) for variable in one.weights] for one in (teacher, student)]
    if not shapes[0] or shapes[0] != shapes[1]:
        raise scaler.InvalidArgument(
            f"{who}: the teacher {teacher.name!r} has weights of other shapes than {student.name!r}: build both alike."
        )
    shared = {id(variable) for variable in teacher.weights} & {id(variable) for variable in student.weights}
    if shared:
        raise scaler.InvalidArgument(
            f"{who}: the teacher {teacher.name!r} shares weights with {student.name!r}: expected a model of its own, "
            "such as keras.models.clone_model(student)."
        )
