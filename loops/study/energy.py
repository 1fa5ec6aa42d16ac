"""A meter of the energy that this machine reports.

RAPL counts that of processors, in Linux, and NVML that of NVIDIA's GPUs.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

_POWERCAP = pathlib.Path("/sys/class/powercap")


class EnergyMeter:
    """Sums joules since its creation: of processors by RAPL, and of NVIDIA's GPUs by NVML.

    The counters cover the whole machine, including other programs. RAPL's wrap around every few minutes to hours, so
    read the meter more often than that.

    Args:
        powercap: The folder of RAPL's counters in Linux, with a subfolder for each processor. Users other than root
            can read them only if the administrator allows it.
    """

    def __init__(self, powercap: pathlib.Path = _POWERCAP):
        self._sources: Sequence[Any] = [*_processors(powercap), *_gpus()]

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


def _processors(powercap: pathlib.Path) -> list[_Rapl]:
    """The counters that can be read, one for each processor package: intel-rapl:0:1 is a part of intel-rapl:0."""
    places = sorted(place for place in powercap.glob("intel-rapl:*") if place.name.count(":") == 1)
    return [found for place in places if (found := _Rapl.readable(place))]


class _Rapl:
    """A counter of microjoules that wraps around to 0."""

    def __init__(self, place: pathlib.Path):
        self.name = f"RAPL {(place / 'name').read_text(encoding='ascii').strip()}"
        self._counter = place / "energy_uj"
        self._range = int((place / "max_energy_range_uj").read_text(encoding="ascii")) + 1
        self._last, self._sum = self._now(), 0

    @classmethod
    def readable(cls, place: pathlib.Path) -> _Rapl | None:
        """The counter in a folder; None if it cannot be read."""
        try:
            return cls(place)
        except (OSError, ValueError):
            return None

    def joules(self) -> float:
        """Joules since the object was created."""
        now = self._now()
        self._sum += (now - self._last) % self._range
        self._last = now
        return self._sum / 1e6

    def _now(self) -> int:
        return int(self._counter.read_text(encoding="ascii"))


class _Nvml:
    """NVML's counter of millijoules since the driver was loaded."""

    def __init__(self, nvml: Any, handle: Any, number: int):
        self.name = f"NVML GPU {number}"
        self._read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        self._failed, self._start = nvml.NVMLError, 0
        self._start = self._read()

    def joules(self) -> float:
        """Joules since the object was created."""
        try:
            return (self._read() - self._start) / 1e3
        except self._failed as error:
            raise ValueError(f"{self.name} no longer answers") from error


def _gpus() -> list[_Nvml]:
    """The counters of this machine's GPUs; empty without a GPU, a driver or the extra `study`."""
    try:
        import pynvml
    except ImportError:
        return []
    found: list[_Nvml] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            found.append(_Nvml(pynvml, pynvml.nvmlDeviceGetHandleByIndex(number), number))
    return found
