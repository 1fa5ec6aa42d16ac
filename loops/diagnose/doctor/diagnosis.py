"""Diagnoses a program's step: its time, its dtypes, its memory, and what makes it faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.doctor.matrix_products import Casts, Padded, casts_of, padded, products_of, shares
from loops.diagnose.doctor.pipeline import Pipeline, pipeline_of
from loops.diagnose.doctor.program import Program, program_of
from loops.diagnose.doctor.timing import Running, Spread, time_interleaved
from loops.diagnose.doctor.trials import Trial, error_line, try_all
from loops.diagnose.graph.census import Row, census
from loops.diagnose.graph.changes import restored
from loops.diagnose.graph.models import loss_in_float32, own_policy
from loops.diagnose.memory.footprint import Footprint, footprints
from loops.diagnose.memory.saved import saved_tensors
from loops.support.errors import LoopError

SECONDS = 2.0
"""The seconds for which each comparison is measured."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Where a step's time and memory go.

    Attributes:
        model: The name of the model.
        policy: The dtype policy of the model.
        device: The device on which it ran, "GPU" or "CPU".
        step: The milliseconds of the step on a batch in memory.
        pipeline: The times of the step with its input pipeline; None if the program gives a single batch.
        products: The share of the multiplications in matrix products and convolutions, by dtype.
        different: The operations whose dtype is not the one that their layer's policy promises.
        casts: The casts of the step; None without any.
        padded: The largest product with a side that is not a multiple of 8; None without any.
        trials: The changes that were tried.
        footprints: The memory under each policy, the model's own first.
    """

    model: str
    policy: str
    device: str
    step: Spread
    pipeline: Pipeline | None
    products: Mapping[str, float]
    different: list[Row]
    casts: Casts | None
    padded: Padded | None
    trials: list[Trial]
    footprints: list[Footprint]

    def as_dict(self) -> dict:
        """The diagnosis as values for JSON."""
        plain = dataclasses.asdict(dataclasses.replace(self, trials=[], footprints=[]))
        if self.pipeline:
            plain["pipeline"]["share"] = self.pipeline.share
        trials, memory = [one.as_dict() for one in self.trials], [one.as_dict() for one in self.footprints]
        return {**plain, "trials": trials, "footprints": memory}


def diagnose_built(
    built: Any, name: str, *, seconds: float = SECONDS, progress: Callable[[str], object] = lambda text: None
) -> Diagnosis:
    """Diagnoses the program that a user's function returned.

    Args:
        built: A `loops.Loop` of a `loops.TrainStep`; or a tuple or dict of model, optimizer, loss and sample.
        name: The name of the function, for errors.
        seconds: The seconds for which each comparison is measured, without tracing.
        progress: Called now and then with a text that says what is done.

    Raises:
        scaler.InvalidArgument: If the return value cannot be trained.
        LoopError: If the data or the step fails.
    """
    try:
        return diagnose(program_of(built, name), seconds=seconds, progress=progress)
    except scaler.ScalerError:
        raise
    except Exception as error:
        raise LoopError(f"{name}: its training step fails: {error_line(error)}") from error


def diagnose(
    program: Program, *, seconds: float = SECONDS, progress: Callable[[str], object] = lambda text: None
) -> Diagnosis:
    """Times a program's step and changes that may make it faster, and counts its bytes under each policy.

    Weights and random generators are restored. The timed steps are the program's own, with new optimizers and loss
    scalers.

    Args:
        program: The program, from `program_of`.
        seconds: The seconds for which each comparison is measured, without tracing.
        progress: Called now and then with a text that says what is done.
    """
    model = program.model
    with restored(model):
        progress("tracing the step")
        step = Running(program, program.step())
        memory = footprints(model, program.loss, program.batch, program.optimizer, masters=program.has_masters)
        traced = saved_tensors(model, loss_in_float32(program.loss), program.batch).traced
        products = products_of(traced)
        counted = census(program.step(), program.batch)
        progress("timing the step")
        alone = time_interleaved(step, step, seconds / 2).before
        pipeline = pipeline_of(program, step, seconds)
        casts, odd = casts_of(counted, seconds / 4), padded(products, seconds / 4)
        trials = []
        for trial in try_all(program, step, seconds):
            progress(f"tried {trial.name}")
            trials.append(trial)
    return Diagnosis(
        model=model.name,
        policy=own_policy(model),
        device="GPU" if tf.config.list_physical_devices("GPU") else "CPU",
        step=alone,
        pipeline=pipeline,
        products=shares(products),
        different=counted.different,
        casts=casts,
        padded=odd,
        trials=trials,
        footprints=memory,
    )
