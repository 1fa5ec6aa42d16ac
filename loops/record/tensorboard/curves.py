"""The names of TensorBoard's curves, what each shows, and the texts beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from loops.loop.visit import Visit
from loops.record.skip_names import skip_names
from loops.support.part_names import columns_of

_TAGS = {
    "loss": "loss",
    "grad_norm": "gradient/global_norm",
    "clipped_norm": "gradient/clipped_norm",
    "norm_limit": "gradient/norm_limit",
    "applied": "step/applied",
}
_AS_TEXT = ("cause", "variable")
_NOT_SHOWN = ("loss_scale", "attempted")
_DESCRIPTIONS = {
    "loss": "The loss of the batch, unscaled.",
    "gradient/global_norm": "The global norm of the gradients, unscaled and before clipping.",
    "gradient/clipped_norm": "The global norm of what the optimizer was given; NaN at a skipped step.",
    "gradient/norm_limit": "The largest norm that a SpikeGuard allowed the step.",
    "loss_limit": "The largest loss that a SpikeGuard allowed the step.",
    "clipped_tensors": "How many gradients a SpikeGuard clipped to limits of their own.",
    "step/applied": "1 where the step moved the weights, 0 where it was skipped.",
    "scaler/log2_scale": "Log2 of the loss scale: one unit doubles the scale.",
    "scaler/skipped": "Skipped steps since the run began.",
    "scaler/headroom": "Octaves from the loss scale up to the critical scale, at which a measured gradient overflows.",
    "activations/headroom": "Octaves from the largest activation or weight up to the largest number of its format.",
    "optimizer/learning_rate": "The learning rate of the next step.",
    "time/steps_per_second": "Steps a second since the last point.",
    "retries": "How often the step took its gradients again, at a lower scale.",
}
_OF_GAUGES = {
    "attention_logit": "The largest magnitude of the layer's attention logits, after the scale and before the softmax.",
    "attention_entropy": "The mean entropy of the layer's attention, in nats: 0 where each query sees one key alone.",
    "update_rms": "The root mean square of what the step added to the layer's weights.",
    "update_ratio": "The same over the root mean square of the weights before the step.",
    "noise_scale": "The simple gradient noise scale, in examples, from averages over about a hundred steps.",
}
SKIPS = "scaler/skips"
"""The name of the texts: one for each skipped step."""
TEXT = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="text"),
    summary_description="Why each skipped step was skipped, and the variable whose gradient was to blame.",
)


def metadata(name: str) -> tf.compat.v1.SummaryMetadata:
    """Marks a number as a point of a curve, with what the curve shows where that is known."""
    plugin_data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    first, _, rest = name.partition("/")
    said = _DESCRIPTIONS.get(name) or _OF_GAUGES.get(first, "")
    if not said:  # Of a part, as in critic/scaler/headroom.
        said = _DESCRIPTIONS.get(rest, "")
    return tf.compat.v1.SummaryMetadata(plugin_data=plugin_data, summary_description=said)


def curves_of(visit: Visit, row: int, named: bool) -> dict[str, float]:
    """The train step's outputs at one step, by the curves' names.

    Args:
        visit: The steps.
        row: The step's index among them.
        named: Whether cause and variable are known by name, and so are texts and no curves.
    """
    values = {name: float(column[row]) for name, column in visit.outputs.items()}
    scales = columns_of(values, "loss_scale")
    left_out = (*_NOT_SHOWN, *scales.values(), *(_AS_TEXT if named else ()))
    curves = {_TAGS.get(name, name): value for name, value in values.items() if name not in left_out}
    for part, name in scales.items():
        curves[f"{part}/scaler/log2_scale".lstrip("/")] = float(np.log2(values[name]))
    return curves


def skip_texts(visit: Visit, train_step: Any) -> list[tuple[int, str]]:
    """A text for each skipped step of a visit, such as "OVERFLOW: dense/kernel"."""
    names = skip_names(visit, train_step)
    pairs = zip(names.get("cause", []), names.get("variable", []), strict=True)
    return [
        (visit.first + row, f"{cause}: {variable}" if variable else cause)
        for row, (cause, variable) in enumerate(pairs)
        if cause
    ]
