"""A train step compiled into calls of many steps, with one visit of the host per call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.steps import call_as_traced
from loops.loop import failed_step
from loops.loop.compilation import StepFunction, checks, looked_up, may_compile
from loops.loop.fetching import Fetching
from loops.loop.kept_batches import HeldBatches
from loops.loop.results import Arrays, CallResult, CounterVariables, Stacked, check_outputs, joined
from loops.loop.silence import Undecided
from loops.loop.source import spec_of, stack, tensors_of
from loops.step.parts import OwnStep
from loops.step.user_steps import Found, find, models_of, read_only
from loops.support.errors import BadBatch
from loops.support.text import one_line

TrainStepFunction = Callable[..., dict[str, tf.Tensor]]
Spectator = Callable[[Any, tf.Tensor], tf.Operation]
"""Takes a batch and the number of its step, in the graph, and returns an operation that the step waits for."""
_NUMBER = tf.TensorSpec([], tf.int32)


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
        written = written or train_step
        self._name = getattr(written, "__name__", type(written).__name__)
        self._models = models_of(written)
        self._of_windows = getattr(written, "accumulate", 1) > 1
        # These return what their own scalers did: no need to compare the two in every step.
        self._trusted = isinstance(written, OwnStep)
        compiles = jit_compile
        if jit_compile is None:
            by_itself = getattr(written, "jit_compile", False) is True
            compiles = not by_itself and may_compile(strategy, self._models, element_spec, steady_rows)
        self._step = StepFunction(train_step, bool(compiles), is_open=jit_compile is None)
        self.said = self._step.said
        self._relaxes, self._worked = True, False
        self._relaxed: Any = None
        self._common: Sequence | None = None
        self._spec = element_spec
        self._counters = counters
        self.in_graph, self._endless = in_graph is not False, endless
        self._open_loop = in_graph is None
        # A dataset inside of a batch has no shape.
        shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in tf.nest.flatten(element_spec)]
        self._shapes_known = all(shape.is_fully_defined() for shape in shapes)
        self._given: Any = None
        self._spectator: Spectator | None = None
        self._held: HeldBatches | None = None
        own = getattr(written, "loss_scaler", None)
        self._own = [own] if isinstance(own, scaler.LossScaler) else []
        self.scalers: list[scaler.LossScaler] = []
        self.undecided = Undecided()
        self._compile()

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles the step; final once the step is traced."""
        return self._step.jit_compile

    def __call__(self, iterator: tf.data.Iterator | Fetching, limit: int) -> CallResult:
        """Takes up to `limit` batches."""
        with self._fresh_after_failure():
            return self._take(iterator, limit)

    def one(self, batch: Any) -> dict[str, np.ndarray]:
        """Takes one step with a given batch, and counts it. Returns each output of the step as an array."""
        with self._fresh_after_failure():
            return {name: value[0] for name, value in self._called(self._one, 1, batch)[0].outputs.items()}

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
        made = tf.function(self._single), tf.function(self._loop)
        self._one, self._many = self._functions.setdefault((self._spectator, self._held is not None), made)

    def go_on_as(self, jit_compile: bool) -> None:
        """Has XLA compile the step as in the run that goes on, where the choice is still open."""
        if self._step.is_open and jit_compile != self.jit_compile:
            self._compile(jit_compile)

    def trace(self) -> tf.types.experimental.ConcreteFunction:
        """The step's concrete function for the dataset's batches; tracing it creates the step's variables."""
        with self._fresh_after_failure(calls=False):
            return self._traced(self._spec)

    def _traced(self, batch: Any) -> tf.types.experimental.ConcreteFunction:
        function = self._step.traced(batch)
        if self._of_windows and _BATCH_NORM not in self.said and _have_batch_norm(self._models):
            self.said.append(_BATCH_NORM)
        return function

    def _tried(self, call: Callable[[], tuple[CallResult, list]]) -> tuple[CallResult, list]:
        """Makes a call over given batches; once more without XLA where that was chosen here and fails.

        XLA refuses a step before it runs any of it, so that nothing has moved.
        """
        if not self._step.tries_xla:
            return call()
        try:
            result = call()
        except tf.errors.OpError:  # XLA's; if the step itself fails, the second call raises it again.
            if not self._step.has_chosen:
                raise
            self._step.unchoose()
            self._compile(False)
            result = call()
        self._step.is_tried = True
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

    def _compile(self, jit_compile: bool | None = None) -> None:
        """Forgets what was traced; None leaves to XLA what it had."""
        self._step.make(self.jit_compile if jit_compile is None else jit_compile)
        self._functions: dict[tuple[Spectator | None, bool], tuple] = {}
        self._of_iterators: dict[Any, tf.types.experimental.ConcreteFunction] = {}
        self._stacked_by: dict[tf.types.experimental.ConcreteFunction, Stacked] = {}
        self._choose_functions()
        self._worked = False

    @property
    def taken(self) -> int:
        """The steps that were taken so far."""
        return int(self._counters.data)

    def _relax(self, batch: Any, common: Sequence[Sequence[int | None] | None] | None) -> None:
        """Traces the step for any length along the sides that differ between batches, where they have many shapes.

        What the loop itself had XLA compile is compiled no more: XLA would do it again for each length. A step that
        cannot be traced so is traced for each shape, with a warning. `common` is that of `Shapes`.
        """
        if not self._relaxes or common is None or common == self._common:
            return
        self._common, why_not = common, None
        if None in common:
            why_not = "an array has not always as many sides"
        elif not tf.config.functions_run_eagerly():
            pairs = zip(common, tf.nest.flatten(spec_of(batch)), strict=True)
            specs = [tf.TensorSpec(sides, one.dtype) for sides, one in pairs]
            relaxed = tf.nest.pack_sequence_as(batch, specs)
            if self._step.has_chosen and self.jit_compile:
                self._compile(False)
            try:
                self._concrete(*((self._many, *_of_stacks(relaxed)) if self.in_graph else (self._one, relaxed)))
                self._relaxed = relaxed
                self.said.append(_ANY_LENGTH.format(shapes=", ".join(str(one.shape) for one in specs)))
            except Exception as error:  # Of any kind: if the step itself is wrong, its next trace raises it again.
                self._compile()
                why_not = one_line(error)
        if why_not:
            self._relaxes, self._relaxed = False, None
            warnings.warn(_EACH_SHAPE.format(why=why_not), UserWarning, stacklevel=7)

    def _of_stack(self, batches: list[Any]) -> CallResult:
        """Takes batches of one shape, arrays on the host, in a loop in the graph, traced once for each shape."""
        specs = _of_stacks(self._relaxed or spec_of(batches[0]))
        count, places = len(batches), tf.constant(1)
        return self._of_given(
            batches, lambda: self._called(self._many, count, stack(batches), tf.constant(count), places, specs=specs)
        )

    def _of_one(self, batch: Any, spec: Any = None) -> CallResult:
        """Takes one step over a batch, as traced for batches like `spec`, if it is given."""
        specs = () if spec is None else (spec,)
        return self._of_given([batch], lambda: self._called(self._one, 1, batch, specs=specs))

    def _of_given(self, batches: list[Any], call: Callable[[], tuple[CallResult, list]]) -> CallResult:
        self._given = batches[0]
        result, _ = self._tried(call)
        if self._held:
            self._held.saw(batches, result.counters.data)
        return result

    def _take(self, iterator: tf.data.Iterator | Fetching, limit: int) -> CallResult:
        why_not = self._why_not_in_graph(iterator) if self._open_loop else None
        self._open_loop = False
        if why_not:
            self.in_graph = False
            result = self._take(iterator, limit)
            warnings.warn(_ONE_BY_ONE.format(why=why_not), UserWarning, stacklevel=6)
            return result
        if isinstance(iterator, Fetching):
            return self._take_fetched(iterator, limit)
        if self._step.tries_xla and limit > 1 and self.in_graph:
            first = self._take(iterator, 1)
            rest = [self._take(iterator, limit - first.steps)] if first.steps else []
            return joined([first, *(one for one in rest if one.steps)], self._counters)
        if not self._step.tries_xla and (self.in_graph or (self._endless and self._shapes_known)):
            return self._take_in_graph(iterator, int(limit))
        try:
            batch = next(iterator)
        except StopIteration:
            return joined([], self._counters)
        # What the loop in the graph will take, too, is traced and compiled once.
        return self._of_one(batch, self._spec if self.in_graph else None)

    def _take_fetched(self, fetching: Fetching, limit: int) -> CallResult:
        """Takes steps over a source, in as many stacks as the shapes and the size of its batches require.

        Fewer are taken before an error of the source, which is raised where the next batch is asked for.
        """
        parts: list[CallResult] = []
        while (left := limit - sum(part.steps for part in parts)) > 0:
            batches = fetching.take(left if self.in_graph else 1)
            if not batches:
                break
            before = self.taken
            fetching.shapes.meet(batches[0])
            self._relax(batches[0], fetching.shapes.common)
            try:
                one = self._of_stack(batches) if self.in_graph else self._of_one(tensors_of(*batches), self._relaxed)
            except tf.errors.OpError:
                # As with a dataset: the batch whose step failed is taken, and those after it are not.
                fetching.drop(min(self.taken - before + 1, len(batches)))
                raise
            fetching.drop(len(batches))
            parts.append(one)
        return joined(parts, self._counters)

    def _called(
        self, function: Any, limit: int, *arguments: Any, specs: Sequence = ()
    ) -> tuple[CallResult, list[tf.Tensor]]:
        """Calls `_one` or `_many`, as traced for `specs` if not for the arguments.

        Returns what it held of batches, too. For an iterator, which is one, TensorFlow looks for a trace only once.
        """
        if tf.config.functions_run_eagerly():
            data, held = function(*arguments)
            return self._stacked.read(data.numpy(), limit), held
        if isinstance(arguments[0], tf.data.Iterator):
            concrete = self._of_iterators.get(function)
            if concrete is None:
                concrete = self._of_iterators[function] = self._concrete(function, *arguments)
            data, held = call_as_traced(concrete, arguments)
        else:
            concrete = self._concrete(function, *(specs or arguments))
            data, held = concrete(*arguments)
        return self._stacked_by[concrete].read(data.numpy(), limit), held

    def _concrete(self, function: Any, *arguments: Any) -> tf.types.experimental.ConcreteFunction:
        """The function as traced for arguments of one kind."""
        concrete = function.get_concrete_function(*arguments)
        self._stacked_by.setdefault(concrete, self._stacked)
        return concrete

    def _take_in_graph(self, iterator: tf.data.Iterator, limit: int) -> CallResult:
        """A call whose graph takes its batches: up to so many steps in a loop there, or one."""
        held = self._held
        if not self.in_graph:
            result, parts = self._called(self._one, 1, iterator)
            if held:
                held.saw([parts], result.counters.data)
            return result
        places = held.most if held else 1
        if held:
            held.make_room(limit)
        result, batches = self._called(self._many, limit, iterator, tf.constant(limit), tf.constant(places))
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
            self._concrete(self._many, iterator, _NUMBER, _NUMBER)
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
        self.scalers = list(dict.fromkeys([*self.scalers, *self._own, *found.scalers]))
        found = Found() if self._trusted else found
        self.undecided.watch(found, self._counters.data)
        before = found.read()
        shown = [] if self._spectator is None else [self._spectator(batch, self._counters.data + 1)]
        looked = looked_up(step) if self._step.has_chosen else None
        with tf.control_dependencies([*shown, *checks(looked or (), batch)]):
            outputs = self._step.function(batch)
        check_outputs(outputs)
        outputs = {name: tf.convert_to_tensor(value) for name, value in outputs.items()}
        self._counters.add(outputs, found, before)
        return outputs

    @scaler.authoring.no_autograph
    def _single(self, source: Any) -> tuple[tf.Tensor, list]:
        """One step over a batch, or over the next one of an iterator, whose tensors are returned if they are held."""
        given = not isinstance(source, tf.data.Iterator)
        batch = source if given else source.get_next()
        outputs = self._counted(batch)
        self._stacked = Stacked(outputs, self._counters)
        return self._stacked.single(outputs, self.scalers), self._held.parts(batch) if self._held and not given else []

    @scaler.authoring.no_autograph
    def _loop(self, source: Any, limit: tf.Tensor, places: tf.Tensor) -> tuple[tf.Tensor, list]:
        """At most `limit` steps over an iterator, or all over a stack of batches on the host.

        The last batches of an iterator are held in so many places, if they are held.
        """
        given = not isinstance(source, tf.data.Iterator)
        may_end = not given and not self._endless
        spec = self._spec
        if given:
            spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), source)
        # This trace also creates the variables of the step.
        outputs_of_step = self._traced(spec).structured_outputs
        check_outputs(outputs_of_step)
        self._stacked = stacked = Stacked(outputs_of_step, self._counters)

        def following(taken: tf.Tensor | int) -> Any:
            """The batch after so many steps, where the data may end before."""
            nothing = tf.experimental.Optional.empty(spec)
            return tf.cond(taken < limit, source.get_next_as_optional, lambda: nothing)

        def body(taken: tf.Tensor, ready: Any, arrays: Arrays, held: list[tf.TensorArray]) -> tuple:
            if given:
                batch = tf.nest.map_structure(lambda part: part[taken], source)
            else:
                batch = ready.get_value() if may_end else source.get_next()
            outputs = self._counted(batch)
            # A step that fails must not have taken the batch after its own.
            with tf.control_dependencies(outputs.values()):
                after = taken + 1
                ready = following(after) if may_end else ready
            if self._held and held:
                held = self._held.write(held, taken % places, batch)
            return after, ready, stacked.write(arrays, taken, outputs), held

        def goes_on(taken: tf.Tensor, ready: Any, arrays: Arrays, held: list[tf.TensorArray]) -> tf.Tensor:
            return ready.has_value() if may_end else taken < limit

        held = self._held.arrays(limit) if self._held and not given else []
        start = (0, following(0) if may_end else (), stacked.arrays(limit), held)
        steps, _, arrays, held = tf.while_loop(goes_on, body, start)
        return stacked.whole(steps, arrays, self.scalers), [one.flow for one in held]


def _have_batch_norm(models: Iterable[keras.layers.Layer]) -> bool:
    layers = [layer for model in models for layer in scaler.observe.layers_of(model)]
    return any(isinstance(layer, keras.layers.BatchNormalization) and layer.trainable for layer in layers)


def _of_stacks(spec: Any) -> tuple:
    """What the loop in the graph is traced for, for stacks of such batches."""
    many = tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape], one.dtype), spec)
    return many, _NUMBER, _NUMBER


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
