"""Checks whether loss scaling and float32 masters of a set-up fit the dtypes of its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

import scaler
from loops.diagnose.lint.finding import Finding, Kind
from loops.step.train_step import TrainStep
from loops.support.text import agreeing, amount


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Whether a loss scaler runs, and whether 16-bit weights have masters.

    Attributes:
        scales: Whether the loss is scaled.
        has_masters: Whether 16-bit variables have float32 masters.
        description: The reason in words, such as "the optimizer scales by Dynamic".
    """

    scales: bool
    has_masters: bool
    description: str


def scaling_of(optimizer: Any) -> Scaling:
    """The scaling of an optimizer, or of the train step that holds it.

    Raises:
        scaler.InvalidArgument: For anything else.
    """
    if isinstance(optimizer, TrainStep):
        strategy = optimizer.loss_scaler.strategy
        return Scaling(
            _moves(strategy) or optimizer.layerwise is not None,
            not optimizer.allow_16bit_updates,
            f"the TrainStep scales by {type(strategy).__name__}",
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, scaler.LossScaleOptimizer):
        strategy = optimizer.loss_scaler.strategy
        return Scaling(_moves(strategy), True, f"the optimizer scales by {type(strategy).__name__}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return Scaling(True, False, "the optimizer is keras.optimizers.LossScaleOptimizer")
    if isinstance(optimizer, keras.optimizers.Optimizer):
        factor = optimizer.loss_scale_factor
        description = f"the optimizer is {kind}" + (f" with loss_scale_factor={factor:g}" if factor else "")
        return Scaling(bool(factor) and factor != 1, False, description)
    if callable(optimizer):
        return Scaling(False, False, f"the optimizer is the function {getattr(optimizer, '__name__', kind)}")
    raise scaler.InvalidArgument(
        f"lint(optimizer={optimizer!r}): expected a Keras optimizer, an hs.LossScaleOptimizer, an hs.TrainStep "
        "that holds the optimizer, or a function of (grads, variables)."
    )


def _moves(strategy: Any) -> bool:
    """Whether a strategy ever uses a loss scale other than 1."""
    low, high = scaler.strategies.float_bounds_of(strategy)
    fixed = isinstance(strategy, (scaler.NoScaling, scaler.Static)) or float(low) == float(high)
    return not fixed or float(strategy.init().loss_scale) != 1.0


def scaling_findings(
    model: keras.Model, layers: list[keras.layers.Layer], scaling: Scaling, lost_share: Callable[[], str]
) -> list[Finding]:
    """Findings for dtypes of a model that do not fit the scaling of the set-up.

    Args:
        model: The model.
        layers: The layers that the forward pass calls.
        scaling: The scaling of the set-up.
        lost_share: Returns a sentence on the gradients that float16 loses without a scale; called only if needed.
    """
    by_dtype: dict[str, list[str]] = {"float16": [], "bfloat16": []}
    for layer in layers:
        if layer.compute_dtype in by_dtype and not isinstance(layer, keras.layers.InputLayer):
            by_dtype[layer.compute_dtype].append(layer.name)
    half, brain = by_dtype["float16"], by_dtype["bfloat16"]
    findings = []
    if half and not scaling.scales:
        findings.append(
            Finding(
                None,
                "the model computes in float16 and nothing scales the loss: gradients below 6e-8 become 0.",
                f"{_layers(half)} in float16, such as {half[0]!r}; {scaling.description}. {lost_share()}".strip(),
                "Use hs.TrainStep with loss_scaler=hs.LossScaler(hs.Dynamic()), or wrap the optimizer in "
                "hs.LossScaleOptimizer.",
                Kind.NO_SCALING,
            )
        )
    if brain and not half and scaling.scales:
        findings.append(
            Finding(
                None,
                "the model computes in bfloat16, which has the range of float32, but the loss is scaled: that gains "
                "nothing, and every overflow that it causes skips a step.",
                f"{_layers(brain)} in bfloat16, such as {brain[0]!r}, and none in float16; {scaling.description}.",
                "Use loss_scaler=hs.LossScaler(hs.NoScaling()), or the optimizer without a wrapper.",
                Kind.NEEDLESS_SCALING,
            )
        )
    return findings + _masters(model, scaling)


def _layers(names: list[str]) -> str:
    return f"{amount(len(names), 'layer')} {agreeing(len(names), 'computes', 'compute')}"


def _masters(model: keras.Model, scaling: Scaling) -> list[Finding]:
    found = [one for one in model.trainable_variables if one.dtype in ("float16", "bfloat16")]
    if scaling.has_masters or not found:
        return []
    ratio = {"float16": "2^-11", "bfloat16": "2^-8"}[found[0].dtype]
    return [
        Finding(
            None,
            f"weights are stored in {found[0].dtype} and trained without float32 masters: an update smaller than "
            f"{ratio} of its weight is lost.",
            f"{len(found)} of {amount(len(model.trainable_variables), 'trainable variable')} "
            f"{agreeing(len(found), 'has', 'have')} 16 bits, such as {found[0].path!r}; {scaling.description}.",
            "Use hs.TrainStep or hs.LossScaleOptimizer, which create masters automatically, or the policy "
            f"'mixed_{found[0].dtype}'.",
            Kind.NO_MASTERS,
        )
    ]
