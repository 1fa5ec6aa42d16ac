"""TensorFlow's list of kernels, which names those for GPUs also where there is no GPU.

get_registered_kernels_for_op  the kernels of an operation   absent: what runs on a GPU is not known
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.versions import unsupported


class Kernel(NamedTuple):
    """One kernel of an operation for GPUs.

    Attributes:
        dtypes: The allowed dtypes of each attribute that is limited.
        in_host_memory: Names of the arguments and results that it keeps in the host's memory.
    """

    dtypes: dict[str, frozenset[tf.DType]]
    in_host_memory: frozenset[str]


def gpu_kernels(operation: str) -> list[Kernel]:
    """The kernels for GPUs of a type of operation, those that TensorFlow prefers first.

    Raises:
        UnsupportedVersion: If TensorFlow does not tell.
    """
    try:
        from tensorflow.python.framework import kernels

        found = kernels.get_registered_kernels_for_op(operation).kernel
    except (ImportError, AttributeError) as error:
        raise unsupported("gpu_kernels", "does not list the kernels of an operation.") from error
    on_gpus = sorted(_on_gpus(found), key=lambda kernel: -kernel.priority)
    return [
        Kernel(
            {one.name: frozenset(map(tf.as_dtype, one.allowed_values.list.type)) for one in kernel.constraint},
            frozenset(kernel.host_memory_arg),
        )
        for kernel in on_gpus
    ]


def _on_gpus(kernels: Any) -> Iterator[Any]:
    return (kernel for kernel in kernels if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label)
