"""Everything that is found out about a program's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.doctor.pipeline import Pipeline, pipeline_of
from loops.diagnose.doctor.products import Casts, Padded, casts_of, padded, products_of, shares
from loops.diagnose.doctor.program import Program, program_of
from loops.diagnose.doctor.timing import Running, Spread, take_turns
from loops.diagnose.doctor.trials import Trial, sentence, try_all
from loops.diagnose.graph.census import Row, census
from loops.diagnose.graph.policies import loss_in_float32, own_policy
from loops.diagnose.graph.restore import restored
from loops.diagnose.memory.activations import saved_tensors
from loops.diagnose.memory.count import footprints
from loops.diagnose.memory.footprint import Footprint
from loops.support.errors import LoopError

SECONDS = 2.0
"""For which each comparison is measured."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Where a step's time and memory go.

    Attributes:
        model: Its name.
        policy: Its dtype policy.
        device: What it ran on: "GPU" or "CPU".
        step: Milliseconds of the step on a batch in memory.
        pipeline: The step with its input pipeline; None where a batch was given.
        products: By dtype, the share of the multiplications of products and convolutions.
        different: Operations that compute in another dtype than their layer's policy promises.
        casts: None for a step without any.
        padded: The largest product with a side that is no multiple of 8; None where there is none.
        trials: What was tried.
        footprints: The memory, first under the model's own policy.
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
        """For JSON."""
        plain = dataclasses.asdict(dataclasses.replace(self, trials=[], footprints=[]))
        if self.pipeline:
            plain["pipeline"]["share"] = self.pipeline.share
        trials, memory = [one.as_dict() for one in self.trials], [one.as_dict() for one in self.footprints]
        return {**plain, "trials": trials, "footprints": memory}


def examine(
    built: Any, name: str, *, seconds: float = SECONDS, progress: Callable[[str], object] = lambda text: None
) -> Diagnosis:
    """Diagnoses what a function of the user's returned.

    Args:
        built: As `program_of` takes it.
        name: The function's, for errors.
        seconds: As for `diagnose`.
        progress: As for `diagnose`.

    Raises:
        scaler.InvalidArgument: If it is nothing that can be trained.
        LoopError: If its data or its step fails.
    """
    try:
        return diagnose(program_of(built, name), seconds=seconds, progress=progress)
    except scaler.ScalerError:
        raise
    except Exception as error:
        raise LoopError(f"{name}: its training step fails: {sentence(error)}") from error


def diagnose(
    program: Program, *, seconds: float = SECONDS, progress: Callable[[str], object] = lambda text: None
) -> Diagnosis:
    """Times a program's step and what may make it faster, and counts its bytes under each policy.

    Weights and random generators are afterwards what they were. The steps that are timed are the program's own, with
    new optimizers and loss scalers.

    Args:
        program: From `program_of`.
        seconds: For how long to measure each comparison, without tracing.
        progress: Told what is being done.
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
        alone = take_turns(step, step, seconds / 2).before
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
