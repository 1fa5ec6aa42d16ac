"""Finds known 16-bit problems before training: stresses each layer, and checks the set-up and the traced graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

import scaler
from loops.diagnose.graph.models import first_batch, taken_apart
from loops.diagnose.lint import graph_rules, run_rules
from loops.diagnose.lint.stress import fails_under_stress
from loops.diagnose.lint.subject import Finding, Subject, subject_of
from loops.loop.loop import Loop

RULES: tuple[Callable[[Subject], Iterable[Finding]], ...] = (
    run_rules.on_the_sample,
    graph_rules.fitting_scaling,
    graph_rules.missing_masters,
    graph_rules.half_loss,
    graph_rules.half_outputs,
    graph_rules.lost_constants,
    graph_rules.large_weights,
    graph_rules.infinite_normalizations,
    graph_rules.narrow_statistics,
    graph_rules.rounded_indices,
    fails_under_stress,
    graph_rules.odd_shapes,
)
"""Each yields its findings. The first one runs the model, which measures the inputs of the layers."""


def lint(
    model: keras.Model, optimizer: Any, loss: Callable, sample: Any, *, xla: bool = False, format: str | None = None
) -> list[Finding]:
    """Finds what is known to hurt training in 16 bits, by running each layer at rising magnitudes.

        for finding in loops.observe.lint(model, optimizer, loss_fn, next(iter(dataset))):
            print(finding.layer, finding.finding, finding.instead)

    Every layer that computes in float16 runs alone, forward and backward, on values of one sign and of both signs, and
    again in float32 on the same values. The model and its loss are traced in their own dtypes and in float32, to check
    constants and the loss. The model also runs on the whole sample; if something is not finite there, it runs again in
    float32. Weights, statistics and random generators are restored bit for bit.

    Args:
        model: A Keras model. If it is not built, the sample builds it.
        optimizer: A Keras optimizer, wrapped or not, or a function of (grads, variables): without a wrapper nothing
            scales the loss. Or the `loops.TrainStep` that holds optimizer and loss scaler.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight), as `TrainStep` takes it.
        sample: A batch `(x, y)` or `(x, y, sample_weight)` of arrays or tensors, or a dataset, whose first batch is
            used.
        xla: Whether each layer is also compiled by XLA, forward and backward, in its own dtype, to name those that it
            refuses. It takes about a second for a layer.
        format: A format of `scaler.formats.emulated`, to name the layers that cannot be in it: their rounding alone
            moves the gradients by more than the noise of the batch does, or by half of their norm. The model then also
            runs on each half of the sample.

    Returns:
        The findings: those about the whole set-up first, then layer by layer, with notes at the end.

    Raises:
        scaler.InvalidArgument: For arguments of the wrong kind.
        BadBatch: For a sample that is empty, or does not fit the model and the loss.
        OutOfData: For an empty dataset.
    """
    rules = [*RULES, *([run_rules.not_compiled] if xla else [])]
    if format is not None:
        scaler.formats.emulated(format)
        rules.append(run_rules.unfit_for_format)
    with subject_of(model, optimizer, loss, sample, format) as subject:
        findings = [finding for rule in rules for finding in rule(subject)]
    return sorted(findings, key=lambda finding: finding.is_note)


def lint_program(built: Any, name: str, *, xla: bool = False, format: str | None = None) -> list[Finding]:
    """Lints the program that a user's function returned.

    Args:
        built: A `loops.Loop` of a `loops.TrainStep`, whose dataset gives the sample; or a tuple, or a dict with these
            keys, of model, optimizer, loss and sample. Of a dataset as the sample the first batch is used.
        name: The name of the function, for errors.
        xla: Whether to name the layers that XLA cannot compile, too.
        format: A format whose unfit layers to name, too.

    Raises:
        scaler.InvalidArgument: For anything else.
        OutOfData: If the dataset is empty.
    """
    model, optimizer, loss, sample = taken_apart(built, f"--build {name}")
    sample = first_batch(built.position.iterator if isinstance(built, Loop) else sample, f"--build {name}")
    return lint(model, optimizer, loss, sample, xla=xla, format=format)
