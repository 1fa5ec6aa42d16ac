"""The energy of NVIDIA's GPUs: counted by NVML, or summed from the power that `nvidia-smi` prints."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import weakref
from collections.abc import Sequence
from typing import Any

_EVERY = 0.2
"""Seconds between two readings of `nvidia-smi`."""


def gpus() -> Sequence[Nvml | Smi]:
    """The readable energy sources of this machine's GPUs; empty without one."""
    return _by_nvml() or _by_smi()


class Nvml:
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

    def close(self) -> None:
        """Does nothing: nothing is open."""


class Smi:
    """The power of all GPUs, which an `nvidia-smi` process prints periodically, summed over time."""

    def __init__(self, program: str):
        self.name = "nvidia-smi"
        query = ["--query-gpu=power.draw", "--format=csv,noheader,nounits", f"--loop-ms={round(1000 * _EVERY)}"]
        self._process = subprocess.Popen(
            [program, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._sum, self._known = 0.0, threading.Event()
        self.close = weakref.finalize(self, _end, self._process)
        self._thread = threading.Thread(target=_add_up, args=(weakref.ref(self), self._process.stdout), daemon=True)
        self._thread.start()

    def add(self, watts: float) -> None:
        """Adds one reading of one GPU."""
        self._sum += watts * _EVERY
        self._known.set()

    def says(self, seconds: float) -> bool:
        """Whether it prints a reading within `seconds`."""
        for _ in range(50):
            if self._known.wait(seconds / 50) or self._process.poll() is not None:
                break
        return self._known.is_set()

    def joules(self) -> float:
        """Joules since the object was created."""
        if self._process.poll() is not None:
            raise ValueError("nvidia-smi has ended")
        return self._sum


def _add_up(meter: Any, lines: Any) -> None:
    with contextlib.suppress(ValueError):  # A closed pipe, or "[N/A]".
        for line in lines:
            owner = meter()
            if owner is None:
                return
            owner.add(float(line))


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    process.wait()
    if process.stdout:
        process.stdout.close()


def _by_nvml() -> list[Nvml]:
    try:
        import pynvml
    except ImportError:
        return []
    found: list[Nvml] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            found.append(Nvml(pynvml, pynvml.nvmlDeviceGetHandleByIndex(number), number))
    return found


def _by_smi(patience: float = 5.0) -> list[Smi]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        found = Smi(program)
    except OSError:
        return []
    if found.says(patience):
        return [found]
    found.close()
    return []
