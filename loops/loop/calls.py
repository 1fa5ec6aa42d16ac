"""A train step compiled into calls of many steps, with one visit of the host per call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.loop import failed_step
from loops.loop.arrays import spec_of, stack
from loops.loop.compilation import COMPILED, can_be_compiled, checks, has_gpu, looked_up, may_compile
from loops.loop.counters import CounterVariables
from loops.loop.fetching import Fetching, take_fetched
from loops.loop.kept_batches import HeldBatches
from loops.loop.results import (
    Arrays,
    CallResult,
    Stacked,
    call_result,
    check_outputs,
    joined,
    pack,
    status,
    status_size,
    unpack,
)
from loops.loop.silence import Undecided
from loops.step.parts import OwnStep
from loops.step.user_steps import Found, find, models_of, read_only
from loops.support.errors import BadBatch
from loops.support.text import one_line

TrainStepFunction = Callable[..., dict[str, tf.Tensor]]
Spectator = Callable[[Any, tf.Tensor], tf.Operation]
"""Takes a batch and the number of its step, in the graph, and returns an operation that the step waits for."""
_NUMBER = tf.TensorSpec([], tf.int32)
_Written = tuple[Arrays, list[tf.TensorArray]]
"""The outputs of a call's steps, and the batches that are held."""


class StepCalls:
    """Runs a train step over an iterator, up to n steps a call, and counts.

    `in_graph=False` is a Python loop around a compiled step. True is a loop inside the graph, which takes batches and
    stacks outputs there, so that the host waits once per call. None is a loop inside the graph, unless the step cannot
    be traced there for batches of unknown shape: some steps need the shape of each batch as a number.

    Args:
        train_step: Any callable from a batch to a dict of tensors.
        element_spec: The dataset's.
        counters: The variables that count.
        in_graph: Whether the loop is in the graph; None to choose.
        endless: Whether the data is certain never to end.
        jit_compile: Whether XLA compiles the step; None to decide by the device and the step.
        strategy: A `tf.distribute` strategy whose replicas take the step, or None.
        written: The user's own step, if `train_step` wraps it.
        steady_rows: Whether all batches but the last one have as many rows, as far as that is known.

    Attributes:
        train_step: The argument.
        in_graph: Whether the loop is in the graph; final after the first call.
        jit_compile: Whether XLA compiles the step; final once the step is traced.
        said: What was chosen that makes a call longer, as sentences.
        scalers: The loss scalers that the step moves; empty before it is traced.
        undecided: Whether any of its loss scalers only scales.
    """

    def __init__(
        self,
        train_step: TrainStepFunction,
        element_spec: Any,
        counters: CounterVariables,
        *,
        in_graph: bool | None,
        endless: bool,
        jit_compile: bool | None,
        strategy: tf.distribute.Strategy | None = None,
        written: TrainStepFunction | None = None,
        steady_rows: bool = True,
    ):
        self.train_step = train_step
        self._name = getattr(written or train_step, "__name__", type(written or train_step).__name__)
        self._models = models_of(written or train_step)
        self._of_windows = getattr(written or train_step, "accumulate", 1) > 1
        # These return what their own scalers did: no need to compare the two in every step.
        self._trusted = isinstance(written or train_step, OwnStep)
        self._open = jit_compile is None
        self.said: list[str] = []
        self._has_chosen, self._is_tried, self._relaxes = False, False, True
        self._relaxed: Any = None
        self._common: Sequence | None = None
        if self._open and getattr(written or train_step, "jit_compile", False) is True:
            jit_compile = False
        self.jit_compile = (
            may_compile(strategy, self._models, element_spec, steady_rows) if jit_compile is None else jit_compile
        )
        self._spec = element_spec
        self._counters = counters
        self.in_graph, self._endless = in_graph is not False, endless
        self._open_loop = in_graph is None
        # A dataset inside of a batch has no shape.
        shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in tf.nest.flatten(element_spec)]
        self._shapes_known = all(shape.is_fully_defined() for shape in shapes)
        self._worked = False
        self._given: Any = None
        self._spectator: Spectator | None = None
        self._held: HeldBatches | None = None
        self._own = getattr(written or train_step, "loss_scaler", None)
        self.scalers: list[scaler.LossScaler] = []
        self.undecided = Undecided()
        self._step: tf.types.experimental.PolymorphicFunction
        self._compile()

    def __call__(self, iterator: tf.data.Iterator | Fetching, limit: int) -> CallResult:
        """Takes up to `limit` batches."""
        with self._fresh_after_failure():
            return self._take(iterator, limit)

    def one(self, batch: Any) -> dict[str, np.ndarray]:
        """Takes one step with a given batch, and counts it. Returns each output of the step as an array."""
        with self._fresh_after_failure():
            return {name: value.numpy() for name, value in self._one(batch)[0].items()}

    def show_batches(self, to: Spectator | None) -> None:
        """Passes each batch of later calls to a function, in their graph and just before its step.

        Args:
            to: The function, or None to stop.
        """
        self._spectator = to
        self._choose_functions()

    def hold_batches(self, held: HeldBatches | None) -> None:
        """Holds the last batches of each later call by reference. The step itself stays as it is.

        Args:
            held: What holds them, or None to stop.
        """
        self._held = held
        self._choose_functions()

    def _choose_functions(self) -> None:
        written = (self._of_batch, self._of_iterator, self._loop)
        made = tuple(tf.function(one) for one in written)
        key = self._spectator, self._held is not None
        self._one, self._next, self._many = self._functions.setdefault(key, made)

    def go_on_as(self, jit_compile: bool) -> None:
        """Has XLA compile the step as in the run that goes on, where the choice is still open."""
        if self._open and jit_compile != self.jit_compile:
            self.jit_compile = jit_compile
            self._compile()

    def trace(self) -> tf.types.experimental.ConcreteFunction:
        """The step's concrete function for the dataset's batches; tracing it creates the step's variables."""
        with self._fresh_after_failure(calls=False):
            return self._traced(self._spec)

    def _traced(self, batch: Any) -> tf.types.experimental.ConcreteFunction:
        """The step's concrete function: without XLA if the choice was left open and XLA cannot compile the step."""
        with warnings.catch_warnings():
            if self._tries_xla:  # It will be seen whether it does.
                warnings.filterwarnings("ignore", "XLA may refuse to compile", scaler.ScaleWarning)
            if self._open and self.jit_compile and not can_be_compiled(self._step, batch):
                self.jit_compile = False
                self._step = tf.function(self.train_step)
        if self._open and self.jit_compile and not has_gpu():
            self.said.append(COMPILED)
            self._has_chosen = True
        self._open = False
        function = self._step.get_concrete_function(batch)
        if self._of_windows and _BATCH_NORM not in self.said and any(map(_has_batch_norm, self._models)):
            self.said.append(_BATCH_NORM)
        return function

    @property
    def _tries_xla(self) -> bool:
        """Whether the loop chose XLA on a CPU by itself, and no call has shown yet that XLA takes the step."""
        chosen = self._has_chosen or (self._open and self.jit_compile and not has_gpu())
        return chosen and not self._is_tried

    def _tried(self, call: Callable[[], CallResult]) -> CallResult:
        """Makes a call over given batches; once more without XLA where that was chosen here and fails.

        XLA refuses a step before it runs any of it, so that nothing has moved.
        """
        if not self._tries_xla:
            return call()
        try:
            result = call()
        except tf.errors.OpError:  # XLA's; if the step itself fails, the second call raises it again.
            if not self._has_chosen:
                raise
            self.jit_compile = self._has_chosen = False
            self.said.remove(COMPILED)
            self._compile()
            result = call()
        self._is_tried = True
        return result

    @contextlib.contextmanager
    def _fresh_after_failure(self, *, calls: bool = True) -> Iterator[None]:
        """Compiles again if the first call fails: that tf.function would refuse the variables of its next trace.

        It also has the error say at which step it came, unless it is one of ours at the first step, which names
        what is wrong with the step itself.
        """
        try:
            yield
            self._worked = self._worked or calls
        except Exception as error:  # Of any kind, the user's own included: it is raised again as it is.
            if self.taken or isinstance(error, BadBatch) or not isinstance(error, scaler.ScalerError):
                failed_step.note(error, self._name, self.taken + 1, self._spec, self._given)
            if not self._worked:
                self._compile()
            raise
        finally:
            self._given = None

    def _compile(self) -> None:
        self._step = tf.function(self.train_step, jit_compile=self.jit_compile or None)
        self._functions: dict[tuple[Spectator | None, bool], tuple] = {}
        self._concrete: dict[Any, tf.types.experimental.ConcreteFunction] = {}
        self._stacked_by: dict[tf.types.experimental.ConcreteFunction, Stacked] = {}
        self._choose_functions()
        self._worked = False

    @property
    def taken(self) -> int:
        """The steps that were taken so far."""
        return int(self._counters.data)

    def relax(self, batch: Any, common: Sequence[Sequence[int | None] | None] | None) -> None:
        """Traces the step for any length along the sides that differ between batches, where they have many shapes.

        What the loop itself had XLA compile is compiled no more: XLA would do it again for each length. A step that
        cannot be traced so is traced for each shape, with a warning.

        Args:
            batch: One of a source, as arrays.
            common: What the shapes of its arrays have in common, see `Shapes`; None while they are few.
        """
        if self._relaxes and common is not None and None in common:
            self._relaxes, self._relaxed = False, None
            warnings.warn(_EACH_SHAPE.format(why="an array has not always as many sides"), UserWarning, stacklevel=7)
        if not self._relaxes or common in (None, self._common) or tf.config.functions_run_eagerly():
            return
        self._common = common
        specs = [
            tf.TensorSpec(sides, one.dtype) for sides, one in zip(common, tf.nest.flatten(spec_of(batch)), strict=True)
        ]
        relaxed = tf.nest.pack_sequence_as(batch, specs)
        if self._has_chosen and self.jit_compile:
            self.jit_compile = False
            self._compile()
        try:
            self._function_of(relaxed)
        except Exception as error:  # Of any kind: if the step itself is wrong, its next trace raises it again.
            self._compile()
            self._relaxes, self._relaxed = False, None
            warnings.warn(_EACH_SHAPE.format(why=one_line(error)), UserWarning, stacklevel=7)
            return
        self.said.append(_ANY_LENGTH.format(shapes=", ".join(str(one.shape) for one in specs)))
        self._relaxed = relaxed

    def _function_of(self, spec: Any) -> tf.types.experimental.ConcreteFunction:
        """What takes batches of a source: a stack of them in the graph, or one."""
        if not self.in_graph:
            return self._one.get_concrete_function(spec)
        many = tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape], one.dtype), spec)
        function = self._many.get_concrete_function(many, _NUMBER, _NUMBER)
        self._stacked_by.setdefault(function, self._stacked)
        return function

    def of_stack(self, batches: list[Any]) -> CallResult:
        """Takes every batch of a stack, in a loop inside the graph, which is traced once for each shape of batches.

        Args:
            batches: One or more of one shape, as arrays on the host.
        """
        return self._tried(lambda: self._of_stack(batches))

    def _of_stack(self, batches: list[Any]) -> CallResult:
        self._given = batches[0]
        eagerly = tf.config.functions_run_eagerly()
        function = self._many if eagerly else self._function_of(self._relaxed or spec_of(batches[0]))
        data, _ = function(stack(batches), tf.constant(len(batches)), tf.constant(1))
        result = self._read(data, len(batches), self._stacked_by.get(function, self._stacked))
        if self._held:
            self._held.saw(batches, result.counters.data)
        return result

    def of_one(self, batch: Any) -> CallResult:
        """Takes one step."""
        return self._tried(lambda: self._of_one(batch, self._relaxed))

    def _of_one(self, batch: Any, spec: Any = None) -> CallResult:
        self._given = batch
        function = self._one if spec is None else self._one.get_concrete_function(spec)
        outputs, found = function(batch)
        rows = {name: value.numpy()[np.newaxis] for name, value in outputs.items()}
        result = call_result(found.numpy(), rows, self._counters, self.scalers)
        if self._held:
            self._held.saw([batch], result.counters.data)
        return result

    def of_none(self) -> CallResult:
        """Takes no step."""
        return call_result(status(0, self._counters, []).numpy(), {}, self._counters, [])

    def _read(self, data: tf.Tensor, limit: int, stacked: Stacked) -> CallResult:
        layout = [(tf.dtypes.float64, [status_size(self.scalers)]), *stacked.layout(limit)]
        found, *arrays = unpack(data.numpy(), layout)
        return call_result(found, stacked.split(arrays, int(found[0])), self._counters, self.scalers)

    def _take(self, iterator: tf.data.Iterator | Fetching, limit: int) -> CallResult:
        why_not = self._why_not_in_graph(iterator) if self._open_loop else None
        self._open_loop = False
        if why_not:
            self.in_graph = False
            result = self._take(iterator, limit)
            warnings.warn(_ONE_BY_ONE.format(why=why_not), UserWarning, stacklevel=6)
            return result
        if isinstance(iterator, Fetching):
            return take_fetched(self, iterator, limit)
        if self._tries_xla and limit > 1 and self.in_graph:
            first = self._take(iterator, 1)
            rest = [self._take(iterator, limit - first.steps)] if first.steps else []
            return joined([first, *(one for one in rest if one.steps)])
        if not self._tries_xla and (self.in_graph or (self._endless and self._shapes_known)):
            return self._take_in_graph(iterator, int(limit))
        try:
            batch = next(iterator)
        except StopIteration:
            return self.of_none()
        # What the loop in the graph will take, too, is traced and compiled once.
        return self._tried(lambda: self._of_one(batch, self._spec if self.in_graph else None))

    def _called(self, function: tf.types.experimental.PolymorphicFunction, *arguments: Any) -> Any:
        """Calls a function whose arguments are of one kind each time: TensorFlow looks for its trace only once."""
        if tf.config.functions_run_eagerly():
            return function(*arguments)
        concrete = self._concrete.get(function)
        if concrete is None:
            concrete = self._concrete[function] = function.get_concrete_function(*arguments)
        return concrete(*arguments)

    def _take_in_graph(self, iterator: tf.data.Iterator, limit: int) -> CallResult:
        """A call whose graph takes its batches: up to so many steps in a loop there, or one."""
        held = self._held
        if not self.in_graph:
            data, parts = self._called(self._next, iterator)
            result = self._read(data, 1, self._stacked)
            if held:
                held.saw([parts], result.counters.data)
            return result
        places = held.most if held else 1
        if held:
            held.make_room(limit)
        data, batches = self._called(self._many, iterator, tf.constant(limit), tf.constant(places))
        result = self._read(data, limit, self._stacked)
        if held:
            held.took(batches, result.counters.data, result.steps, places)
        return result

    def _why_not_in_graph(self, iterator: tf.data.Iterator | Fetching) -> str | None:
        """Why the step cannot be taken in a loop inside the graph; None if it can."""
        if tf.config.functions_run_eagerly():
            return "TensorFlow runs functions eagerly"
        if self._shapes_known:
            return None  # A Python loop would trace the step for the same shapes.
        try:
            self._many.get_concrete_function(iterator, _NUMBER, _NUMBER)
        except Exception as error:  # Of any kind: if the step itself is wrong, the Python loop raises it again.
            self._compile()
            return f"it cannot be traced for batches of unknown shape ({one_line(error)})"
        return None

    @scaler.authoring.no_autograph
    def _counted(self, batch: Any) -> dict[str, tf.Tensor]:
        step = self._traced(batch)
        scaler.authoring.repeat_checks(step)
        found = find(step)
        read_only(self._models, step).warn_of_unfrozen(
            "Loop", "Make the step and the loop again, with a new optimizer and new MasterWeights."
        )
        own = [self._own] if isinstance(self._own, scaler.LossScaler) else []
        self.scalers = list(dict.fromkeys([*self.scalers, *own, *found.scalers]))
        found = Found() if self._trusted else found
        self.undecided.watch(found, self._counters.data)
        before = found.read()
        shown = [] if self._spectator is None else [self._spectator(batch, self._counters.data + 1)]
        looked = looked_up(step) if self._has_chosen else None
        with tf.control_dependencies([*shown, *checks(looked or (), batch)]):
            outputs = self._step(batch)
        check_outputs(outputs)
        outputs = {name: tf.convert_to_tensor(value) for name, value in outputs.items()}
        self._counters.add(outputs, found, before)
        return outputs

    @scaler.authoring.no_autograph
    def _of_batch(self, batch: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        outputs = self._counted(batch)
        return outputs, self._status(1)

    @scaler.authoring.no_autograph
    def _of_iterator(self, iterator: tf.data.Iterator) -> Any:
        batch = iterator.get_next()
        outputs = self._counted(batch)
        self._stacked = Stacked(outputs)
        data = pack([self._status(1), *self._stacked.rows(outputs)])
        return data, self._held.parts(batch) if self._held else []

    def _status(self, steps: tf.Tensor | int) -> tf.Tensor:
        return status(steps, self._counters, self.scalers)

    @scaler.authoring.no_autograph
    def _loop(self, batches: Any, limit: tf.Tensor, places: tf.Tensor) -> Any:
        """Steps over an iterator, or over a stack of batches on the host.

        Args:
            batches: The iterator, or the stack.
            limit: The most steps, or as many as the stack has.
            places: In how many places the last batches of the iterator are held, if they are held.
        """
        if not isinstance(batches, tf.data.Iterator):
            specs = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), batches)
            steps, (arrays, held) = self._all(
                lambda taken: tf.nest.map_structure(lambda part: part[taken], batches),
                limit,
                (self._arrays(specs, limit), []),
                None,
            )
        else:
            empty = self._arrays(self._spec, limit), self._held.arrays(limit) if self._held else []
            if self._endless:
                steps, (arrays, held) = self._all(lambda taken: batches.get_next(), limit, empty, places)
            else:
                steps, (arrays, held) = self._until_the_end(batches, limit, empty, places)
        return pack([self._status(steps), *self._stacked.stack(arrays)]), [batch.flow for batch in held]

    def _arrays(self, batch: Any, limit: tf.Tensor) -> Arrays:
        """Arrays for the outputs of the step for such batches; tracing the step also creates its variables."""
        specs = self._traced(batch).structured_outputs
        check_outputs(specs)
        self._stacked = Stacked(specs)
        return self._stacked.arrays(limit)

    def _written(
        self, arrays: _Written, taken: tf.Tensor, outputs: dict, batch: Any, places: tf.Tensor | None
    ) -> _Written:
        """The arrays with the outputs of one step, and its batch where batches are held in places."""
        rows, batches = arrays
        if self._held and places is not None:
            batches = self._held.write(batches, taken % places, batch)
        return self._stacked.write(rows, taken, outputs), batches

    def _all(
        self, batch_at: Callable[[tf.Tensor], Any], limit: tf.Tensor, arrays: _Written, places: tf.Tensor | None
    ) -> tuple[tf.Tensor, _Written]:
        def body(taken: tf.Tensor, arrays: _Written) -> tuple:
            batch = batch_at(taken)
            outputs = self._counted(batch)
            # A step that fails must not have taken the batch after its own.
            with tf.control_dependencies(outputs.values()):
                following = taken + 1
            return following, self._written(arrays, taken, outputs, batch, places)

        return tf.while_loop(lambda taken, arrays: taken < limit, body, (0, arrays))

    def _until_the_end(
        self, iterator: tf.data.Iterator, limit: tf.Tensor, arrays: _Written, places: tf.Tensor | None
    ) -> tuple[tf.Tensor, _Written]:
        def next_unless_done(taken: tf.Tensor) -> tf.experimental.Optional:
            nothing = tf.experimental.Optional.empty(self._spec)
            return tf.cond(taken < limit, iterator.get_next_as_optional, lambda: nothing)

        def body(taken: tf.Tensor, ready: tf.experimental.Optional, arrays: _Written) -> tuple:
            batch = ready.get_value()
            outputs = self._counted(batch)
            # A step that fails must not have taken the batch after its own.
            with tf.control_dependencies(outputs.values()):
                following = next_unless_done(taken + 1)
            return taken + 1, following, self._written(arrays, taken, outputs, batch, places)

        taken, _, arrays = tf.while_loop(
            lambda taken, batch, arrays: batch.has_value(), body, (0, next_unless_done(0), arrays)
        )
        return taken, arrays


def _has_batch_norm(model: keras.layers.Layer) -> bool:
    layers = scaler.observe.layers_of(model)
    return any(isinstance(layer, keras.layers.BatchNormalization) and layer.trainable for layer in layers)


_BATCH_NORM = "BatchNorm's statistics are those of each micro-batch, not of the whole step"
_ONE_BY_ONE = (
    "Loop: this step cannot run in a loop inside the graph, since {why}. Each call takes one step. Pass "
    "steps_per_call=1 if this is intended."
)
_ANY_LENGTH = "the batches have many shapes, so the step is traced for any length where they differ: {shapes}"
_EACH_SHAPE = (
    "Loop: the batches of the source have many shapes, and this step is traced for each of them, which may take longer "
    "than the step, since it cannot be traced for any length ({why}). Pad the batches to a few lengths."
)
