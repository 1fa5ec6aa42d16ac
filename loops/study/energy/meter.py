"""A meter of the energy that this machine reports."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from loops.study.energy.gpus import gpus
from loops.study.energy.rapl import POWERCAP, processors


class EnergyMeter:
    """Sums joules since its creation: of processors by RAPL, and of NVIDIA's GPUs by NVML or `nvidia-smi`.

    The counters cover the whole machine, including other programs. RAPL's wrap around every few minutes to hours, so
    read the meter more often than that.

    Args:
        powercap: The folder of RAPL's counters in Linux, with a subfolder for each processor. Users other than root
            can read them only if the administrator allows it.
    """

    def __init__(self, powercap: pathlib.Path = POWERCAP):
        self._gpus = gpus()
        self._sources: Sequence[Any] = [*processors(powercap), *self._gpus]

    def __enter__(self) -> EnergyMeter:
        return self

    def __exit__(self, *exception: object) -> None:
        for gpu in self._gpus:
            gpu.close()

    @property
    def sources(self) -> list[str]:
        """The names of the sources; empty if the machine reports no energy."""
        return [one.name for one in self._sources]

    def joules(self) -> float | None:
        """Joules since the meter was created; None if the machine does not report them, or no longer does."""
        try:
            return sum(one.joules() for one in self._sources) if self._sources else None
        except (OSError, ValueError):
            return None
