"""Times a program's step interleaved with itself under one change: a machine is slower in one minute than in the next.

A change is a row: what it is called, how to make it, and how to time the step with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import loss_in_float32, own_policy, under
from loops.diagnose.graph.models import first_batch, taken_apart
from loops.diagnose.memory import blocks_of, checkpointed, copy_of
from loops.loop.loop import Loop
from loops.step.train_step import TrainStep
from loops.support.batches import explaining, parts
from loops.support.errors import LoopError, OutOfData


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to diagnose.

    Attributes:
        model: The model, which is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight).
        optimizer: A Keras optimizer without a loss scaler around it, or a function of (grads, variables).
        strategy: The strategy of the loss scaler, or None if the program has none.
        settings: Further arguments of its `TrainStep`.
        batch: The first batch, as tensors.
        dataset: The dataset of the batches; None if the program gives a single batch.
        compiled: Whether XLA compiles the whole step, as with `Loop(jit_compile=True)`.
        steps_per_call: The `steps_per_call` of its `Loop`; None if the loop chooses it.
    """

    model: keras.Model
    loss: Callable[..., Any]
    optimizer: Any
    strategy: Any
    settings: Mapping[str, Any]
    batch: Any
    dataset: tf.data.Dataset | None
    compiled: bool = False
    steps_per_call: int | None = 1

    def step(self, *, as_it_is: bool = True, **changes: Any) -> TrainStep:
        """A new step of the program, with a new optimizer and loss scaler, and other settings, such as `jit_compile`.

        Unless `as_it_is`, as under another dtype policy, the loss scaler is the default one for the policy.
        """
        keras_one = isinstance(self.optimizer, keras.optimizers.Optimizer)
        chosen = as_it_is and self.strategy is not None
        return TrainStep(
            self.model,
            loss_in_float32(self.loss),
            copy_of(self.optimizer) if keras_one else self.optimizer,
            loss_scaler=scaler.LossScaler(self.strategy) if chosen else None,
            **{**self.settings, **changes},
        )


_SETTINGS = ("accumulate", "clip_norm", "clip", "jit_compile", "allow_16bit_updates")


def program_of(built: Any, name: str) -> Program:
    """Takes the return value of a user's function apart.

    Args:
        built: A `loops.Loop` of a `loops.TrainStep`; or a tuple, or a dict with these keys, of model, optimizer, loss
            and sample, which is a batch or a dataset.
        name: The name of the function, for errors.

    Raises:
        scaler.InvalidArgument: For anything else, and for a model without trainable variables.
        OutOfData: If the dataset is empty.
        BadBatch: If a batch does not fit the model.
    """
    model, optimizer, loss, sample = taken_apart(built, name)
    step: Any = built.train_step if isinstance(built, Loop) else None
    if step is not None and (step.layerwise is not None or built.replicas > 1):
        raise scaler.InvalidArgument(
            f"{name}: it returned a Loop on {built.replicas} replicas, or with layerwise=, whose step cannot be "
            "created again under another policy: return one for a single device, without layerwise=."
        )
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(f"{name}: its model is {model!r}: expected a keras.Model.")
    if not callable(loss):
        raise scaler.InvalidArgument(f"{name}: its loss is {loss!r}: expected a function of (y, prediction).")
    dataset = sample if isinstance(sample, tf.data.Dataset) else None
    given = parts(first_batch(sample, name), name)
    batch = tuple(one for one in given if one is not None)
    if given[1] is None or not all(hasattr(one, "shape") for one in tf.nest.flatten(batch)):
        raise scaler.InvalidArgument(
            f"{name}: its sample is {type(sample).__name__}: expected a batch (x, y) or (x, y, sample_weight) of "
            "arrays or tensors, or a dataset of such batches."
        )
    batch = tf.nest.map_structure(lambda one: one if tf.is_tensor(one) else tf.convert_to_tensor(one), batch)
    if not model.built:
        try:
            with explaining(name, model, batch[0], batch[1]):
                model(batch[0], training=False)
        except scaler.ScalerError:
            raise
        except Exception as error:
            raise LoopError(f"{name}: the model cannot be built: {type(error).__name__}: {error}") from error
    if not model.trainable_variables:
        raise scaler.InvalidArgument(
            f"{name}: model {model.name!r} has no trainable variables, so there is no training step to diagnose."
        )
    optimizer, strategy = (step.optimizer, step.loss_scaler.strategy) if step else _unwrapped(optimizer, name)
    called = (built.calls.jit_compile, built.steps_per_call) if isinstance(built, Loop) else ()
    settings = {setting: getattr(step, setting) for setting in _SETTINGS} if step else {}
    if step is not None and step.masters is not None and type(step.masters) is not scaler.MasterWeights:
        settings["masters"] = type(step.masters)
    return Program(model, loss, optimizer, strategy, settings, batch, dataset, *called)


def _unwrapped(optimizer: Any, name: str) -> tuple[Any, Any]:
    """The optimizer without its loss scaler, and the strategy of that scaler."""
    if isinstance(optimizer, scaler.LossScaleOptimizer):
        return optimizer.inner_optimizer, optimizer.loss_scaler.strategy
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer, scaler.Dynamic(float(optimizer.initial_scale))
    if isinstance(optimizer, keras.optimizers.Optimizer) or callable(optimizer):
        return optimizer, None
    raise scaler.InvalidArgument(
        f"{name}: its optimizer is {optimizer!r}: expected a Keras optimizer, an hs.LossScaleOptimizer, or a "
        "function of (grads, variables)."
    )


_WARM_UP = 2
_FEWEST, _MOST = 9, 400
_LONGEST, _FEWEST_OF_LONG = 60.0, 3
"""The seconds after which fewer rounds are enough, and how many."""
STEPS_A_CALL = 20
"""The number of steps in a call that takes several."""
_TIMED = ("float32", "mixed_float16", "mixed_bfloat16")
_LONG = 500.0
"""The milliseconds above which a step gains nothing from fewer calls."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of two or more values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class PairedTiming:
    """The times of two functions that were called alternately.

    Attributes:
        before: The milliseconds of the first.
        after: The milliseconds of the second.
        ratio: The time of the second over the first, within each round.
    """

    before: Spread
    after: Spread
    ratio: Spread

    def of_one(self, count: int) -> PairedTiming:
        """The times per step, if each call took `count` steps."""
        before, after = (
            Spread(one.median / count, one.low / count, one.high / count) for one in (self.before, self.after)
        )
        return PairedTiming(before, after, self.ratio)

    @property
    def verdict(self) -> str:
        """Either "faster" or "slower", if three quarters of the rounds agree, or "the same": within the noise."""
        if self.ratio.high < 1:
            return "faster"
        return "slower" if self.ratio.low > 1 else "the same"


def time_interleaved(before: Callable[[], object], after: Callable[[], object], seconds: float) -> PairedTiming:
    """Times two functions alternately; the first one leads in even rounds, the second one in odd rounds.

    Args:
        before: A function that returns when its work is finished.
        after: The second such function.
        seconds: The seconds to measure, after a warm-up. There are at least nine rounds, or three if nine take more
            than a minute.
    """
    for _ in range(_WARM_UP):
        before()
        after()
    taken: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while (rounds := len(taken[0])) < _MOST:
        passed = time.perf_counter() - start
        if rounds >= (_FEWEST if passed < _LONGEST else _FEWEST_OF_LONG) and passed >= seconds:
            break
        for place in (0, 1) if rounds % 2 == 0 else (1, 0):
            taken[place].append(milliseconds((before, after)[place]))
    ratios = [second / first for first, second in zip(*taken, strict=True)]
    return PairedTiming(Spread.of(taken[0]), Spread.of(taken[1]), Spread.of(ratios))


def milliseconds(function: Callable[[], object]) -> float:
    """The time that a function takes, in milliseconds."""
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


class Running:
    """A traced step. It keeps the dtype policy and other settings with which it was traced.

    Args:
        program: The program whose batches it takes.
        step: A step of the program.
        many: Whether a call takes `STEPS_A_CALL` steps in the graph.
    """

    def __init__(self, program: Program, step: TrainStep, *, many: bool = False):
        self._batch = program.batch
        self._times = step.accumulate
        function: Any = tf.function(step, jit_compile=program.compiled or None)
        if many:
            self._times, function = 1, tf.function(_many(function))
        self._call = function.get_concrete_function(tf.nest.map_structure(tf.type_spec_from_value, program.batch))

    def __call__(self, batch: Any = None) -> tuple[bool, bool]:
        """Takes a step, with all of its micro-batches; whether it was attempted, and whether it was skipped."""
        for _ in range(self._times):
            outputs = self._call(self._batch if batch is None else batch)
        attempted, applied = bool(outputs["attempted"]), bool(outputs["applied"])
        tf.test.experimental.sync_devices()
        return attempted, attempted and not applied


def _many(step: Callable) -> Callable:
    def many(batch: Any) -> dict[str, tf.Tensor]:
        nothing = (tf.constant(0), tf.constant(False), tf.constant(False))

        def body(taken: tf.Tensor, *_: tf.Tensor) -> tuple:
            outputs = step(batch)
            return taken + 1, tf.convert_to_tensor(outputs["attempted"]), tf.convert_to_tensor(outputs["applied"])

        _, attempted, applied = tf.while_loop(lambda taken, *_: taken < STEPS_A_CALL, body, nothing)
        return {"attempted": attempted, "applied": applied}

    return many


def batches_like(like: Any, dataset: tf.data.Dataset) -> Iterator[Any]:
    """Repeats the batches of a dataset, and leaves out those of another shape than this one.

    Raises:
        OutOfData: If there is none in the whole dataset, as in a dataset that cannot be read twice.
    """
    found, shapes = True, _shapes(like)
    while found:
        found = False
        for batch in map(tuple, dataset):
            if _shapes(batch) == shapes:
                found = True
                yield batch
    raise OutOfData(
        "the dataset gave no further batch of the shape of its first one: expected one that can be read again from its "
        "beginning, such as a dataset of tensors or files."
    )


def _shapes(batch: Any) -> list:
    return [one.shape for one in tf.nest.flatten(batch)]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The times of the input pipeline.

    Attributes:
        alone: The milliseconds of one batch, with nothing else running.
        turns: The times of the step with a batch in memory, and of the step with a batch from the pipeline.
        attempted: The number of steps with batches from the pipeline.
        skipped: The number of these steps that were skipped.
    """

    alone: Spread
    turns: PairedTiming
    attempted: int
    skipped: int

    @property
    def share(self) -> float:
        """The share of the pipeline in the time of a step with its pipeline."""
        return max(0.0, 1 - 1 / self.turns.ratio.median)


def pipeline_of(program: Program, step: Running, seconds: float) -> Pipeline | None:
    """Compares the step alone with the step with its pipeline; None for a program without a pipeline."""
    if program.dataset is None:
        return None
    batches = batches_like(program.batch, program.dataset)
    alone = time_interleaved(batches.__next__, batches.__next__, seconds / 2).before
    seen: list[tuple[bool, bool]] = []
    turns = time_interleaved(step, lambda: seen.append(step(next(batches))), seconds)
    return Pipeline(alone, turns, sum(attempted for attempted, _ in seen), sum(skipped for _, skipped in seen))


class Kind(str, enum.Enum):
    """What a trial changes."""

    PREFETCH = "prefetch"
    STEPS_PER_CALL = "steps_per_call"
    JIT_COMPILE = "jit_compile"
    POLICY = "policy"
    RECOMPUTE = "recompute"


_CHANGES = {
    Kind.PREFETCH: ("prefetch", "end the dataset with .prefetch(tf.data.AUTOTUNE)"),
    Kind.STEPS_PER_CALL: (
        f"{STEPS_A_CALL} steps a call",
        f"hs.Loop(..., steps_per_call={STEPS_A_CALL}); in fit compile(steps_per_execution={STEPS_A_CALL})",
    ),
    Kind.JIT_COMPILE: ("jit_compile=True", "hs.TrainStep(..., jit_compile=True); in fit compile(jit_compile=True)"),
    Kind.POLICY: ("{policy}", "keras.config.set_dtype_policy('{policy}') before the model is created"),
    Kind.RECOMPUTE: (
        "gradient checkpointing",
        "tf.recompute_grad around each block, which saves memory and costs time",
    ),
}
"""What each is called, and what to write for it."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A change that was tried.

    Attributes:
        kind: The kind of the change.
        turns: The times before and after; None if it could not be tried.
        problem: Why it could not be tried, or None.
        policy: The dtype policy that was tried, or None.
    """

    kind: Kind
    turns: PairedTiming | None
    problem: str | None = None
    policy: str | None = None

    @property
    def name(self) -> str:
        """The change in a few words."""
        return _CHANGES[self.kind][0].format(policy=self.policy)

    @property
    def advice(self) -> str:
        """What to write to make the change."""
        return _CHANGES[self.kind][1].format(policy=self.policy)

    @property
    def verdict(self) -> str:
        """One of "faster", "slower", "the same" and "not tried"."""
        return self.turns.verdict if self.turns else "not tried"

    def as_dict(self) -> dict:
        """The trial as values for JSON."""
        return {"name": self.name, "advice": self.advice, **dataclasses.asdict(self), "verdict": self.verdict}


def try_all(program: Program, step: Running, seconds: float) -> Iterator[Trial]:
    """Tries changes that may make the step faster, one after the other.

    Args:
        program: The program.
        step: The step as it is.
        seconds: The seconds for which each change is measured, without tracing.
    """

    def changed(change: contextlib.AbstractContextManager, **settings: Any) -> PairedTiming:
        with change:
            after = Running(program, program.step(**settings))
        return time_interleaved(step, after, seconds)

    if program.dataset is not None:
        plain = batches_like(program.batch, program.dataset)
        ahead = batches_like(program.batch, program.dataset.prefetch(tf.data.AUTOTUNE))
        yield Trial(Kind.PREFETCH, time_interleaved(lambda: step(next(plain)), lambda: step(next(ahead)), seconds))
    if program.settings.get("accumulate", 1) == 1 and program.steps_per_call == 1:
        yield _many_steps_a_call(program, step, seconds)
    if not (program.settings.get("jit_compile") or program.compiled):
        yield _try(Kind.JIT_COMPILE, lambda: changed(contextlib.nullcontext(), jit_compile=True))
    for policy in _TIMED:
        if policy != own_policy(program.model):
            other = under(program.model, policy)
            yield _try(Kind.POLICY, functools.partial(changed, other, as_it_is=False), policy)
    if blocks_of(program.model):
        yield _try(Kind.RECOMPUTE, lambda: changed(checkpointed(program.model)))


def _many_steps_a_call(program: Program, step: Running, seconds: float) -> Trial:
    def many_times() -> None:
        for _ in range(STEPS_A_CALL):
            step()

    def measure() -> PairedTiming:
        many = Running(program, program.step(), many=True)
        return time_interleaved(many_times, many, seconds).of_one(STEPS_A_CALL)

    step()
    took = milliseconds(step)
    if took > _LONG:
        problem = f"a step takes {took / 1000:.1f} s, and the time between two steps does not matter"
        return Trial(Kind.STEPS_PER_CALL, None, problem)
    return _try(Kind.STEPS_PER_CALL, measure)


def _try(kind: Kind, measure: Callable[[], PairedTiming], policy: str | None = None) -> Trial:
    try:
        return Trial(kind, measure(), policy=policy)
    except (scaler.ScalerError, tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        return Trial(kind, None, error_line(error), policy)


def error_line(error: Exception) -> str:
    """An error in one line, without the stack that TensorFlow adds."""
    kind = type(error).__name__
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(f"{kind}: ")]
    line = named[-1] if named else lines[-1] if str(error).startswith("in user code") else next(iter(lines), "")
    return f"{kind}: {line.removeprefix(f'{kind}: ')}"[:300]
