"""One training run on a task, from its options to its files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.actions.checkpoint import Checkpoint
from loops.backend.variables import components
from loops.loop.loop import Loop
from loops.loop.visit import Action, Visit
from loops.record.files import CHECKPOINTS, STEPS, SUMMARY, TRACE, write_json
from loops.record.lines import JsonLines
from loops.record.log import read_log
from loops.record.trace import Trace
from loops.run.strategy_text import parse_strategy
from loops.step.train_step import TrainStep
from loops.support.errors import check
from loops.tasks import Task


def weights_digest(model: keras.Model) -> str:
    """SHA-256 over the bytes of all of the model's variables, in hexadecimal.

    The order is `model.variables`: layer by layer, trainable ones before the others, seed generators included. For each
    variable the dtype and shape are hashed, then the values in C order, little-endian. Names are left out: Keras
    numbers layers per process.
    """
    digest = hashlib.sha256()
    for variable in model.variables:
        values = np.ascontiguousarray(variable.numpy())
        digest.update(f"{values.dtype.name} {values.shape}\n".encode())
        if values.dtype.kind in "iuf":
            values = values.astype(values.dtype.newbyteorder("<"))
        digest.update(values.tobytes())
    return digest.hexdigest()


POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")
"""The Keras dtype policies of runs."""
STEPS_PER_CALL = 50
"""Steps between visits, unless checkpoints are saved more often."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options that determine a run's result.

    Attributes:
        policy: The Keras dtype policy, one of `POLICIES`.
        strategy: The scaling strategy as text, see `parse_strategy`.
        steps: The number of batches to take.
        seed: The seed of the initial weights and of the order of the data.
        masters: Whether 16-bit variables are trained through float32 masters; False is unsafe, for a baseline.
        loss_factor: A constant factor of the loss. Adam's epsilon is multiplied too, so that the factor would change
            nothing without rounding.
        learning_rate: Adam's learning rate.
        batch_size: Examples per step.
        emulated: The format of the layers' products, as `scaler.formats.emulated` takes it; None for the policy's own.
        unit_scaled: Whether the model and its loss are those of `scaler.formats.unit_scaled`.
    """

    policy: str
    strategy: str
    steps: int
    seed: int
    masters: bool = True
    loss_factor: float = 1.0
    learning_rate: float = 1e-2
    batch_size: int = 64
    emulated: str | None = None
    unit_scaled: bool = False

    def __post_init__(self) -> None:
        if self.emulated is not None:
            scaler.formats.emulated(self.emulated)
        check(f"policy {self.policy!r}", self.policy in POLICIES, f"one of {', '.join(POLICIES)}")
        parse_strategy(self.strategy)

    def facts(self) -> dict:
        """All options by name, as files hold them."""
        return dataclasses.asdict(self)


def model_of(task: Task, options: RunOptions) -> keras.Model:
    """The model of a run before its first step."""
    model = task.model(options.policy)
    if options.emulated is not None:
        scaler.formats.emulated(options.emulated)(model)
    return scaler.formats.unit_scaled(model) if options.unit_scaled else model


def loss_of(task: Task, options: RunOptions) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """The loss of a run without its factor."""
    return scaler.formats.unit_cross_entropy if options.unit_scaled else task.loss


def train(
    task: Task,
    options: RunOptions,
    out: str | os.PathLike,
    actions: Callable[[keras.Model], Iterable[Action]] = lambda model: (),
    *,
    checkpoint_every: int | None = None,
    resume: bool = False,
    changed: Sequence[str] = (),
    trace_every: int | None = None,
    strategy: tf.distribute.Strategy | None = None,
    built_by: Callable[..., Loop] | None = None,
) -> dict:
    """Trains, and writes `out/steps.jsonl` while it runs and `out/summary.json` at its end.

    Operations are made deterministic for the whole process, so that the same options give the same bits again.

    Args:
        task: From `loops.tasks.load`.
        options: The run's options.
        out: A folder. It is made if missing.
        actions: A function from the model to further actions for the loop.
        checkpoint_every: Steps between checkpoints in `out/checkpoints`; None for no checkpoints.
        resume: Whether to resume from the newest checkpoint there, if there is one. Only `options.steps` may differ.
        changed: What else may, as `Checkpoint` takes it.
        trace_every: Steps between histograms in `out/trace.arrow`; None for no trace.
        strategy: A `tf.distribute` strategy to train with, such as from `join_workers`. Only worker 0 writes files
            other than checkpoints.
        built_by: Used in place of `build`, such as the `build` of a `SharedTrace`.

    Returns:
        The contents of `summary.json`.

    Raises:
        OSError: If `out` cannot be written; nothing was trained then.
        CheckpointError: If the checkpoints cannot be used; nothing was trained then.
    """
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    summary_path = out / SUMMARY
    losses = _LastLosses(options.steps, summary_path)

    def all_actions(model: keras.Model) -> list[Action]:
        saves = []
        if checkpoint_every:
            identity = run_identity(task, options)
            place = out / CHECKPOINTS
            saves = [Checkpoint(place, every=checkpoint_every, resume=resume, run=identity, changed=changed)]
        traces = [Trace(out / TRACE, every=trace_every)] if trace_every else []
        return [JsonLines(out / STEPS), losses, *traces, *actions(model), *saves]

    steps_per_call = min(STEPS_PER_CALL, checkpoint_every or STEPS_PER_CALL)
    loop = (built_by or build)(
        task, options, all_actions, steps_per_call=steps_per_call, probes=trace_every is not None, strategy=strategy
    )
    step = loop.train_step
    assert isinstance(step, TrainStep)
    model = step.model
    counters = loop.run(options.steps)
    if strategy:
        model = _copy(model_of(task, options), model)
    summary = {
        "task": task.name,
        **options.facts(),
        **task.scores(model),
        "final_loss": losses.mean(out / STEPS) / options.loss_factor,
        "attempted": counters.attempted,
        "applied": counters.applied,
        "skipped": counters.skipped,
        "loss_scale": float(step.loss_scaler.loss_scale),
        "weights_finite": all(bool(tf.reduce_all(tf.math.is_finite(w))) for w in model.trainable_variables),
        "weights_digest": weights_digest(model),
        "digest_depends_on": _numerical_settings(),
    }
    if strategy:
        summary["workers"], summary["replicas"] = loop.workers.count, strategy.num_replicas_in_sync
    if loop.workers.index == 0:
        write_json(summary_path, summary)
    return summary


def build(
    task: Task,
    options: RunOptions,
    actions: Callable[[keras.Model], Iterable[Action]],
    *,
    steps_per_call: int = STEPS_PER_CALL,
    probes: bool = False,
    strategy: tf.distribute.Strategy | None = None,
) -> Loop:
    """The loop of a run before its first step: the same for the same task and options.

    Operations are made deterministic for the whole process, and its seeds are set.

    Args:
        task: From `loops.tasks.load`.
        options: The run's options.
        actions: A function from the model to the actions of the loop.
        steps_per_call: The argument of `Loop`.
        probes: Whether the step measures its tensors, for a trace.
        strategy: A `tf.distribute` strategy to train with, or None.
    """
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(options.seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, loss = model_of(task, options), loss_of(task, options)
        step = TrainStep(
            model,
            lambda labels, logits: loss(labels, logits) * options.loss_factor,
            keras.optimizers.Adam(options.learning_rate, epsilon=1e-7 * options.loss_factor),
            loss_scaler=scaler.LossScaler(parse_strategy(options.strategy)),
            allow_16bit_updates=not options.masters,
            probes=scaler.observe.watch(model) if probes else None,
        )
    return Loop(
        step,
        task.dataset(options.batch_size, options.seed),
        steps_per_call=steps_per_call,
        strategy=strategy,
        actions=actions(model),
    )


def run_identity(task: Task, options: RunOptions) -> dict:
    """What distinguishes a run from others, for its checkpoints: all options but the number of steps."""
    identity = {"task": task.name, **options.facts()}
    del identity["steps"]
    return identity


def _copy(copied: keras.Model, model: keras.Model) -> keras.Model:
    """Copies the values of this worker's first replica: Keras would otherwise predict on all workers together."""
    for variable, original in zip(copied.variables, model.variables, strict=True):
        variable.assign(components(original)[0])
    return copied


def _numerical_settings() -> dict:
    """What else the bits of a run depend on: two runs on one machine agree if their options and these do."""
    threads = tf.config.threading
    return {
        "intra_op_threads": threads.get_intra_op_parallelism_threads() or os.cpu_count(),
        "inter_op_threads": threads.get_inter_op_parallelism_threads() or os.cpu_count(),
        "jit_compile": False,
        "op_determinism": True,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "devices": [device.device_type for device in tf.config.list_logical_devices()],
    }


class _LastLosses:
    """The losses of the last tenth of a run. When the run begins, removes the summary of an older run."""

    def __init__(self, steps: int, summary_path: pathlib.Path):
        self._count = max(1, steps // 10)
        self._from = steps - self._count
        self._summary_path = summary_path
        self._losses: list[tuple[int, float]] = []

    def __enter__(self) -> _LastLosses:
        self._summary_path.unlink(missing_ok=True)
        return self

    def __exit__(self, *exception: object) -> None: ...

    def __call__(self, visit: Visit) -> None:
        numbered = enumerate(visit.outputs["loss"].tolist(), visit.first)
        self._losses.extend(pair for pair in numbered if pair[0] > self._from)

    def save_state(self) -> list:
        return self._losses

    def load_state(self, value: list) -> None:
        self._losses = [(step, loss) for step, loss in value if step > self._from]

    def mean(self, log: pathlib.Path) -> float:
        """Their mean; NaN if they are not known.

        Args:
            log: Has those that a run with more steps took and did not keep, if this run goes on from its checkpoint.
        """
        losses = [loss for _, loss in self._losses]
        if len(losses) < self._count and log.is_file():
            rows = [row for row in read_log(log) if row["step"] > self._from]
            losses = [math.nan if row["loss"] is None else float(np.float32(row["loss"])) for row in rows]
        return float(np.mean(losses)) if losses else math.nan
