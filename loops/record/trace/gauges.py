"""What the ready probes of a step measured, by name, for a trace and for curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

NOISE, SIGNAL = "noise_scale/noise", "noise_scale/signal"
"""The names of what the noise scale is computed from."""


def gauges_of(train_step: Any) -> list[str]:
    """The names of what a train step's ready probes measure, such as "update_rms/dense"; empty without them.

    Args:
        train_step: A loop's train step, after its first trace.
    """
    gauges = getattr(getattr(train_step, "probes", None), "gauges", {})
    return [f"{output}/{name}" for output, names in gauges.items() for name in names]


def gauge_values(vectors: Mapping[str, np.ndarray], train_step: Any) -> np.ndarray:
    """Float32 [steps, gauges] in the order of `gauges_of`; NaN where a step was not measured.

    Args:
        vectors: Those of a visit.
        train_step: The visit's step, with ready probes.
    """
    return np.concatenate([vectors[output] for output in train_step.probes.gauges], axis=1)
