"""What this machine is, and whether its GPUs, their driver and TensorFlow's build fit together.

A build holds machine code for some compute capabilities ("sm_80") and PTX for others ("compute_90"). Machine code runs
on cards with the same major number and at least this minor one; PTX runs on every newer card, after the driver has
compiled it (NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility"). To compile PTX, the
driver must be as new as the CUDA that generated it (CUDA Compatibility, "Minor Version Compatibility").
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest Linux driver that runs each major version of CUDA (NVIDIA, CUDA Compatibility, table 2)."""
_WITH_CUDA = {
    **{(12, minor): driver for minor, driver in enumerate((525, 530, 535, 545, 550, 555, 560))},
    **{(12, 8): 570, (12, 9): 575, (13, 0): 580},
}
"""The driver branch with which each version of CUDA was released (CUDA Toolkit release notes, table 3)."""
_FORMATS = {
    (8, 9): "tensor cores for float16, bfloat16 and float8.",
    (8, 0): "tensor cores for float16 and bfloat16.",
    (7, 0): "tensor cores for float16; none for bfloat16, which is slow there.",
    (6, 1): "no tensor cores: float16 saves memory, but is not faster than float32.",
    (6, 0): "no tensor cores; float16 has twice the rate of float32. bfloat16 is slow there.",
    (0, 0): "no tensor cores: float16 saves memory, but is not faster than float32.",
}
"""What a card does with each format, from a compute capability on, the newest first."""
_BLACKWELL = (10, 0)
_DRIVER_OF_BLACKWELL = (570, 0)
"""The first driver branch that supports these cards."""
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_CARDS = pathlib.Path("/dev/nvidia0"), pathlib.Path("/proc/driver/nvidia/gpus")
_CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu11")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A card that TensorFlow sees.

    Attributes:
        name: The card's name in the driver.
        capability: Its compute capability, major and minor; None if TensorFlow does not report it.
        grows: Whether TensorFlow allocates its memory only as needed.
    """

    name: str
    capability: tuple[int, int] | None
    grows: bool = False


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The GPUs of a machine and the software for them.

    Attributes:
        build: The result of `tf.sysconfig.get_build_info()`.
        version: The version of TensorFlow.
        gpus: The GPUs that TensorFlow sees.
        card: Whether the system has an NVIDIA card.
        driver: The driver's version, such as "550.54.15", or None.
        cudnn: The version of the installed cuDNN package, or None.
        clusters: Whether TensorFlow compiles parts of any graph by XLA (`tf.config.optimizer.set_jit`).
    """

    build: Mapping[str, Any]
    version: str
    gpus: Sequence[Gpu] = ()
    card: bool = False
    driver: str | None = None
    cudnn: str | None = None
    clusters: bool = False


def about_gpus(found: Surroundings) -> list[str]:
    """Facts and advice, one or two sentences each; nothing on a machine without a card."""
    if not found.gpus:
        return _unseen(found) if found.card else []
    lines = [line for gpu in dict.fromkeys(found.gpus) for line in _about(gpu, found)]
    lines += _driver(found)
    if found.build.get("cudnn_version") and found.cudnn is None:
        lines.append(
            f"cuDNN: no cuDNN package is installed here; this build needs version {found.build['cudnn_version']}, from "
            f"the system or by {_install(found)}."
        )
    if not all(gpu.grows for gpu in found.gpus):
        lines.append(
            "memory: TensorFlow takes all memory of a GPU when it starts. To share it, set "
            "TF_FORCE_GPU_ALLOW_GROWTH=true or call tf.config.experimental.set_memory_growth."
        )
    clusters = "on" if found.clusters else "off"
    lines.append(
        f'XLA: Loop(jit_compile="auto") and fit compile a step on one GPU; automatic clusters are {clusters} '
        "(tf.config.optimizer.set_jit)."
    )
    return lines


def unusable(found: Surroundings) -> str | None:
    """A sentence on why TensorFlow cannot use a GPU here, or None if it can."""
    if found.gpus:
        return _too_old(found)
    return next(iter(about_gpus(found)), "There is no GPU here.")


def _about(gpu: Gpu, found: Surroundings) -> list[str]:
    if gpu.capability is None:
        return [f"{gpu.name}: TensorFlow does not report its compute capability."]
    return [
        f"{gpu.name}: {_runs(gpu.capability, found)}",
        f"{gpu.name}: {next(said for least, said in _FORMATS.items() if gpu.capability >= least)}",
    ]


def _has_code(capability: tuple[int, int], build: Mapping[str, Any]) -> bool:
    code = [_capability_of(name) for name in build.get("cuda_compute_capabilities", ()) if name.startswith("sm_")]
    return any(major == capability[0] and minor <= capability[1] for major, minor in code)


def _runs(capability: tuple[int, int], found: Surroundings) -> str:
    listed = list(found.build.get("cuda_compute_capabilities", ()))
    number = ".".join(map(str, capability))
    if _has_code(capability, found.build):
        return f"compute capability {number}, for which this build has machine code."
    if not any(_capability_of(name) <= capability for name in listed if name.startswith("compute_")):
        return (
            f"compute capability {number}, and this build is for {', '.join(listed) or 'none'}: it does not run there. "
            "Use another version of TensorFlow, or build it for this card."
        )
    line = (
        f"compute capability {number}, for which this build has PTX alone: the driver compiles it, for minutes at the "
        "first start."
    )
    if capability >= _BLACKWELL:
        line += (
            " If that fails with CUDA_ERROR_INVALID_PTX, use NVIDIA's TensorFlow container or a build for this card."
        )
    return line


def _driver(found: Surroundings) -> list[str]:
    if _numbers(found.driver) is None or _oldest_driver(found) is None:
        return []
    return [_too_old(found) or f"driver {found.driver}, CUDA {found.build['cuda_version']} in this build: they fit."]


def _too_old(found: Surroundings) -> str | None:
    version, wanted = _numbers(found.driver), _oldest_driver(found)
    if version is None or wanted is None or version[:2] >= wanted:
        return None
    least = f"{wanted[0]}.{wanted[1]}" if wanted[1] else str(wanted[0])
    cuda = found.build["cuda_version"]
    return f"driver {found.driver}: too old for CUDA {cuda} and this card. Install {least} or newer."


def _oldest_driver(found: Surroundings) -> tuple[int, int] | None:
    """The oldest driver that runs this build on these cards; None for an unknown CUDA version."""
    cuda = _numbers(str(found.build.get("cuda_version", "")))
    if cuda is None or len(cuda) < 2 or cuda[0] not in _DRIVERS:
        return None
    wanted = _DRIVERS[cuda[0]]
    cards = [gpu.capability for gpu in found.gpus if gpu.capability]
    if not all(_has_code(one, found.build) for one in cards):
        wanted = max(wanted, (_WITH_CUDA.get((cuda[0], cuda[1]), 0), 0))
    return max(wanted, _DRIVER_OF_BLACKWELL) if max(cards, default=(0, 0)) >= _BLACKWELL else wanted


def _unseen(found: Surroundings) -> list[str]:
    """Advice for a card that TensorFlow does not see."""
    if not found.build.get("is_cuda_build"):
        return [f"There is an NVIDIA GPU, but this TensorFlow is built without CUDA: {_install(found)}, on Linux."]
    if found.driver is None:
        return ["There is an NVIDIA GPU, but no driver: install NVIDIA's driver for it, then start again."]
    return [
        _too_old(found)
        or f"There is an NVIDIA GPU with driver {found.driver}, but TensorFlow does not see it. Usually the CUDA "
        f"libraries are missing: {_install(found)}. CUDA_VISIBLE_DEVICES may also hide the card."
    ]


def _install(found: Surroundings) -> str:
    return f'pip install "tensorflow[and-cuda]=={found.version}"'


def _capability_of(name: str) -> tuple[int, int]:
    """The capability in a name: (8, 9) for "sm_89", (12, 0) for "compute_120"."""
    digits = "".join(letter for letter in name.partition("_")[2] if letter.isdigit())
    return int(digits[:-1]), int(digits[-1])


def _numbers(version: str | None) -> tuple[int, ...] | None:
    parts = (version or "").split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None


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
        driver=_driver_version(),
        cudnn=_cudnn_version(),
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


def _driver_version() -> str | None:
    if not _DRIVER.exists():
        return None
    found = re.search(r"\s(\d{3}\.\d+(?:\.\d+)*)\s", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else None


def _cudnn_version() -> str | None:
    for name in _CUDNN:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
