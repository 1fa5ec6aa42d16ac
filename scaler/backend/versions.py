"""The installed TensorFlow and Keras: messages about what they lack, and whether float16 is slow with them.

TensorFlow 2.21 gives float16 products and convolutions to oneDNN where the processor has float16 arithmetic of its own,
and oneDNN is slow at those that a bias is added to: a small network took 95 ms a step in place of 0.7, and 1.4 without
oneDNN. XLA does not use oneDNN for them.

_pywrap_util_port.IsMklEnabled   whether TensorFlow uses oneDNN   absent: as its environment variable says, now
"""

from __future__ import annotations

import functools
import os
import pathlib
import warnings

import keras
import tensorflow as tf

from scaler.errors import ScaleWarning, UnsupportedVersion

_REMEDY = "Install a version that this package names in its metadata."
_ARITHMETIC = "avx512_fp16"
_CPU = pathlib.Path("/proc/cpuinfo")
SLOW = (
    "float16 is slow on this processor: TensorFlow gives its products with a bias to oneDNN, which took up to 100 "
    "times as long as float32. Set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported, or "
    "have XLA compile the step: tf.function(jit_compile=True), in fit compile(jit_compile=True). float32 (on the "
    "command line --policy float32) is no slower here, however float16 is run."
)


def versions() -> str:
    """The installed versions, in words."""
    return f"Keras {keras.__version__} on TensorFlow {tf.__version__}"


@functools.cache
def say_once(what: str) -> None:
    """Warns once that something works differently with these versions; `what` follows their names."""
    warnings.warn(f"{versions()} {what}", UserWarning, stacklevel=3)


def unsupported(where: str, what: str) -> UnsupportedVersion:
    """Makes the error for versions that cannot be used here; `what` follows their names."""
    return UnsupportedVersion(f"{where}: {versions()} {what} {_REMEDY}")


@functools.cache
def is_slow_in_float16() -> bool:
    """Whether float16 takes many times as long as it has to, in what XLA does not compile."""
    if tf.config.get_visible_devices("GPU") or not _has_onednn():
        return False
    try:
        return _ARITHMETIC in _CPU.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False


def _has_onednn() -> bool:
    """Whether TensorFlow uses oneDNN."""
    try:
        from tensorflow.python.util import _pywrap_util_port

        return bool(_pywrap_util_port.IsMklEnabled())
    except (ImportError, AttributeError):
        return os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") != "0"


@functools.cache
def warn_of_slow_float16() -> None:
    """Warns, once a process."""
    warnings.warn(SLOW, ScaleWarning, stacklevel=5)
