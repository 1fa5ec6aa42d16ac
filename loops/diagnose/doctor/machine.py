"""What this machine is: its GPUs, their driver and libraries, and how fast it computes in float16."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import re
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

from loops.diagnose.doctor.gpu import Gpu, Surroundings

_FORMATS = ("float32", "float16", "bfloat16")
_SECONDS_EACH = 0.5
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_CARDS = pathlib.Path("/dev/nvidia0"), pathlib.Path("/proc/driver/nvidia/gpus")
_CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu11")


def measure_machine() -> dict:
    """Measures matmul rates, and lists versions and devices.

    Returns:
        `versions`, `devices` (each with `name`, `kind`, `compute_capability` or None), `matmul_size`,
        `matmul_gflops` (the median for float32, float16 and bfloat16) and `verdict`, a sentence.
    """
    gpus = tf.config.list_physical_devices("GPU")
    size = 4096 if gpus else 512
    rates = {name: _matmul_rate(name, size) for name in _FORMATS}
    capability = _capability(gpus[0]) if gpus else None
    return {
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
        "devices": [
            {"name": device.name, "kind": device.device_type, "compute_capability": _capability(device)}
            for device in tf.config.list_physical_devices()
        ],
        "matmul_size": size,
        "matmul_gflops": rates,
        "verdict": verdict(rates, has_gpu=bool(gpus), compute_capability=capability),
    }


def verdict(rates: dict[str, float], *, has_gpu: bool, compute_capability: str | None) -> str:
    """One sentence on whether float16 pays here, with the reason."""
    ratio = rates["float16"] / rates["float32"]
    measured = f"its matmul runs at {ratio:.2g} times float32's rate"
    if not has_gpu:
        where = "TensorFlow sees no GPU here, and without one it saves memory, and is useful for study and tests"
        return f"float16 {'pays' if ratio > 1.2 else 'will not pay'} here: {measured}; {where}."
    chip = f" (compute capability {compute_capability})" if compute_capability else ""
    if ratio > 1.2:
        return f"float16 pays here: {measured} on this GPU{chip}."
    return f"float16 will not pay here: {measured} on this GPU{chip}; tensor cores need 7.0 or newer."


def _capability(device: tf.config.PhysicalDevice) -> str | None:
    capability = tf.config.experimental.get_device_details(device).get("compute_capability")
    return ".".join(map(str, capability)) if capability else None


def _matmul_rate(name: str, size: int) -> float:
    """Billions of floating-point operations per second, the median over repetitions."""
    matrix = tf.cast(tf.random.stateless_normal((size, size), seed=(0, 1)), name)
    multiply = tf.function(lambda a: tf.matmul(a, a))
    multiply(matrix).numpy()
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS_EACH
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        multiply(matrix)[0, 0].numpy()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds) / 1e9


def surroundings() -> Surroundings:
    """Reads the GPUs and the software of this machine, without initializing a GPU."""
    return Surroundings(
        build=dict(tf.sysconfig.get_build_info()),
        version=tf.__version__,
        gpus=[_gpu(device) for device in tf.config.list_physical_devices("GPU")],
        card=any(path.exists() for path in _CARDS),
        driver=_driver(),
        cudnn=_cudnn(),
        clusters=bool(tf.config.optimizer.get_jit()),
    )


def _gpu(device: tf.config.PhysicalDevice) -> Gpu:
    details = tf.config.experimental.get_device_details(device)
    capability = details.get("compute_capability")
    return Gpu(
        name=str(details.get("device_name", device.name)),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        grows=bool(tf.config.experimental.get_memory_growth(device)),
    )


def _driver() -> str | None:
    if not _DRIVER.exists():
        return None
    found = re.search(r"\s(\d{3}\.\d+(?:\.\d+)*)\s", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else None


def _cudnn() -> str | None:
    for name in _CUDNN:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
