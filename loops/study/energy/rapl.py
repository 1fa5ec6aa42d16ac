"""Reads RAPL, the energy counters of processors, from Linux."""

from __future__ import annotations

import pathlib

POWERCAP = pathlib.Path("/sys/class/powercap")


def processors(powercap: pathlib.Path) -> list[Rapl]:
    """The counters that can be read, one for each processor package: intel-rapl:0:1 is a part of intel-rapl:0."""
    places = sorted(place for place in powercap.glob("intel-rapl:*") if place.name.count(":") == 1)
    return [found for place in places if (found := Rapl.readable(place))]


class Rapl:
    """A counter of microjoules that wraps around to 0."""

    def __init__(self, place: pathlib.Path):
        self.name = f"RAPL {(place / 'name').read_text(encoding='ascii').strip()}"
        self._counter = place / "energy_uj"
        self._range = int((place / "max_energy_range_uj").read_text(encoding="ascii")) + 1
        self._last, self._sum = self._now(), 0

    @classmethod
    def readable(cls, place: pathlib.Path) -> Rapl | None:
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
