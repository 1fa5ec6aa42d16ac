"""Trials: times the step as it is and with one change, interleaved."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

import scaler
from loops.diagnose.doctor.program import Program
from loops.diagnose.doctor.timing import STEPS_A_CALL, Batches, PairedTiming, Running, milliseconds, time_interleaved
from loops.diagnose.graph.models import own_policy, under
from loops.diagnose.memory.footprint import blocks_of, checkpointed

_TIMED = ("float32", "mixed_float16", "mixed_bfloat16")
_LONG = 500.0
"""The milliseconds above which a step gains nothing from fewer calls."""


class Kind(str, enum.Enum):
    """What a trial changes."""

    PREFETCH = "prefetch"
    STEPS_PER_CALL = "steps_per_call"
    JIT_COMPILE = "jit_compile"
    POLICY = "policy"
    RECOMPUTE = "recompute"


_NAMES = {
    Kind.PREFETCH: "prefetch",
    Kind.STEPS_PER_CALL: f"{STEPS_A_CALL} steps a call",
    Kind.JIT_COMPILE: "jit_compile=True",
    Kind.POLICY: "{policy}",
    Kind.RECOMPUTE: "gradient checkpointing",
}
_ADVICE = {
    Kind.PREFETCH: "end the dataset with .prefetch(tf.data.AUTOTUNE)",
    Kind.STEPS_PER_CALL: (
        f"hs.Loop(..., steps_per_call={STEPS_A_CALL}); in fit compile(steps_per_execution={STEPS_A_CALL})"
    ),
    Kind.JIT_COMPILE: "hs.TrainStep(..., jit_compile=True); in fit compile(jit_compile=True)",
    Kind.POLICY: "keras.config.set_dtype_policy('{policy}') before the model is created",
    Kind.RECOMPUTE: "tf.recompute_grad around each block, which saves memory and costs time",
}


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
        return _NAMES[self.kind].format(policy=self.policy)

    @property
    def advice(self) -> str:
        """What to write to make the change."""
        return _ADVICE[self.kind].format(policy=self.policy)

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
    if program.dataset is not None:
        plain = Batches(program.dataset, program.batch)
        ahead = Batches(program.dataset.prefetch(tf.data.AUTOTUNE), program.batch)
        turns = time_interleaved(lambda: step(plain.next()), lambda: step(ahead.next()), seconds)
        yield Trial(Kind.PREFETCH, turns)
    if program.settings.get("accumulate", 1) == 1 and program.steps_per_call == 1:
        yield _many_steps_a_call(program, step, seconds)
    if not (program.settings.get("jit_compile") or program.compiled):
        yield _try(
            Kind.JIT_COMPILE,
            lambda: time_interleaved(step, Running(program, program.step(jit_compile=True)), seconds),
        )
    own = own_policy(program.model)
    for policy in _TIMED:
        if policy != own:
            yield _try(
                Kind.POLICY,
                functools.partial(_in_policy, program, step, policy, seconds),
                policy,
            )
    if blocks_of(program.model):
        yield _try(
            Kind.RECOMPUTE,
            lambda: time_interleaved(step, _running_under(program, checkpointed(program.model)), seconds),
        )


def _many_steps_a_call(program: Program, step: Running, seconds: float) -> Trial:
    def measure() -> PairedTiming:
        many = Running(program, program.step(), many=True)
        return time_interleaved(lambda: _each(step, STEPS_A_CALL), many, seconds).of_one(STEPS_A_CALL)

    step()
    took = milliseconds(step)
    if took > _LONG:
        problem = f"a step takes {took / 1000:.1f} s, and the time between two steps does not matter"
        return Trial(Kind.STEPS_PER_CALL, None, problem)
    return _try(Kind.STEPS_PER_CALL, measure)


def _in_policy(program: Program, step: Running, policy: str, seconds: float) -> PairedTiming:
    return time_interleaved(step, _running_under(program, under(program.model, policy), as_it_is=False), seconds)


def _running_under(program: Program, change: contextlib.AbstractContextManager, as_it_is: bool = True) -> Running:
    with change:
        return Running(program, program.step(as_it_is=as_it_is))


def _each(step: Callable[[], object], count: int) -> None:
    for _ in itertools.repeat(None, count):
        step()


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
