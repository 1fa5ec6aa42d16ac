"""The curves of ready probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loops.loop.visit import Visit
from loops.record.noise_scale import Averages
from loops.record.trace.gauges import gauge_values, gauges_of, noise_pairs

WHOLE = "noise_scale"
"""The curve of a step that has no parts."""


class GaugeCurves:
    """The points of ready probes, and the averages that the noise scale is the ratio of."""

    def __init__(self) -> None:
        self._averages: dict[str, Averages] = {}

    def save_state(self) -> dict[str, Any]:
        """The averages, as JSON: that of a whole step, and those of parts by their curves."""
        found = {name: one.save_state() for name, one in self._averages.items()}
        whole: dict[str, Any] = {"averages": found.pop(WHOLE, Averages().save_state())}
        return {**whole, "averages_of_parts": found} if found else whole

    def load_state(self, value: Mapping[str, Any]) -> None:
        """Restores what `save_state` returned."""
        for name, state in {WHOLE: value["averages"], **value.get("averages_of_parts", {})}.items():
            self._averages.setdefault(name, Averages()).load_state(state)

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
        for name, noise, signal in noise_pairs(names):
            averages = self._averages.setdefault(name, Averages())
            parts = zip(columns.pop(noise).tolist(), columns.pop(signal).tolist(), strict=True)
            seen = [(averages.add(*pair), np.isfinite(pair).all()) for pair in parts]
            columns[name] = np.array([value if known else np.nan for value, known in seen])
        return [
            (visit.first + row, name, float(values[row]))
            for row in rows
            for name, values in columns.items()
            if not np.isnan(values[row])
        ]
