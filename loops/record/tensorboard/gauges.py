"""The curves of ready probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loops.loop.visit import Visit
from loops.record.noise_scale import Averages
from loops.record.trace.gauges import NOISE, SIGNAL, gauge_values, gauges_of


class GaugeCurves:
    """The points of ready probes, and the averages that the noise scale is the ratio of."""

    def __init__(self) -> None:
        self.averages = Averages()

    def points(self, visit: Visit, rows: Sequence[int], train_step: Any) -> list[tuple[int, str, float]]:
        """The points (step, curve, value) of some steps of a visit, without those that were not measured.

        Args:
            visit: Its steps all count for the averages.
            rows: The indices of the steps to show.
            train_step: The visit's step.
        """
        names = gauges_of(train_step)
        if not names:
            return []
        columns = dict(zip(names, gauge_values(visit.vectors, train_step).astype(np.float64).T, strict=True))
        if NOISE in columns:
            parts = zip(columns.pop(NOISE).tolist(), columns.pop(SIGNAL).tolist(), strict=True)
            seen = [(self.averages.add(*pair), np.isfinite(pair).all()) for pair in parts]
            columns["noise_scale"] = np.array([value if known else np.nan for value, known in seen])
        return [
            (visit.first + row, name, float(values[row]))
            for row in rows
            for name, values in columns.items()
            if not np.isnan(values[row])
        ]
