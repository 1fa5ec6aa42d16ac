"""What the ready probes of a step measured, by name, for a trace and for curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loops.step.probing import watched_by


def gauges_of(train_step: Any) -> list[str]:
    """The names of what a train step's ready probes measure, such as "update_rms/dense"; empty without them.

    Those of a part have its name before the layer's: "update_rms/critic/dense".

    Args:
        train_step: A loop's train step, after its first trace.
    """
    return [
        one.row(f"{output}/{name}")
        for one in watched_by(train_step)
        for output, names in getattr(one.watch, "gauges", {}).items()
        for name in names
    ]


def gauge_values(vectors: Mapping[str, np.ndarray], train_step: Any) -> np.ndarray:
    """Float32 [steps, gauges] in the order of `gauges_of`; NaN where a step was not measured.

    Args:
        vectors: Those of a visit.
        train_step: The visit's step, with ready probes.
    """
    watches = watched_by(train_step)
    return np.concatenate([vectors[one.output(output)] for one in watches for output in one.watch.gauges], axis=1)


def noise_pairs(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """For each step or part whose noise scale is measured its curve's name and those of its noise and its signal.

    Args:
        names: Of gauges.
    """
    noises = [name for name in names if name.startswith("noise_scale/") and name.endswith("/noise")]
    pairs = [(name.removesuffix("/noise"), name, f"{name.removesuffix('noise')}signal") for name in noises]
    return [pair for pair in pairs if pair[2] in names]
