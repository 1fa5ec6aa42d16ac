"""Joules from when a meter was made, of all that this machine tells."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from loops.study.energy.gpus import gpus
from loops.study.energy.rapl import POWERCAP, processors


class EnergyMeter:
    """Adds up joules from when it was made: of the processors by RAPL, of NVIDIA's GPUs by NVML or `nvidia-smi`.

    The counters are those of the whole machine: what other programs use meanwhile is in them. RAPL's begin again from 0
    every few minutes to hours, so read the meter more often than that.

    Args:
        powercap: Where Linux shows RAPL's counters, one folder for each processor. Others than root can read them only
            where the administrator allows it.
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
        """What is counted, in words; empty where the machine tells nothing."""
        return [one.name for one in self._sources]

    def joules(self) -> float | None:
        """Used since the meter was made; None where the machine does not tell, or no longer."""
        try:
            return sum(one.joules() for one in self._sources) if self._sources else None
        except (OSError, ValueError):
            return None
