"""What this machine is: its devices, and its GPUs' driver and libraries."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import re

import keras
import numpy as np
import tensorflow as tf

from loops.diagnose.doctor.gpu import Gpu, Surroundings

_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_CARDS = pathlib.Path("/dev/nvidia0"), pathlib.Path("/proc/driver/nvidia/gpus")
_CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu11")


def machine() -> dict:
    """The versions and devices.

    Returns:
        `versions`, and `devices`, each with `name`, `kind`, and `compute_capability` or None.
    """
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
    }


def _capability(device: tf.config.PhysicalDevice) -> str | None:
    capability = tf.config.experimental.get_device_details(device).get("compute_capability")
    return ".".join(map(str, capability)) if capability else None


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
