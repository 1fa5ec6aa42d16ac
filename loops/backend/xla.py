"""What XLA can compile, from TensorFlow's list of kernels.

framework.kernels, framework.config:
get_registered_kernels_for_op  the kernels of an operation   absent: a step counts as one that XLA cannot compile:
                                                               slower, the same numbers except for last bits
is_op_determinism_enabled      whether it is on              absent: counts as on, so XLA is not used either
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from loops.backend.steps import kinds_of_operations

_FOR_GPUS = "XLA_GPU_JIT"
_OF_EVERY_GRAPH = frozenset({"Placeholder", "NoOp"})


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called, or it is unknown."""
    try:
        from tensorflow.python.framework import config

        return bool(config.is_op_determinism_enabled())
    except (ImportError, AttributeError):
        return True


def not_for_xla(concrete: tf.types.experimental.ConcreteFunction) -> Sequence[str] | None:
    """The kinds of operations of a function that XLA has no kernel for; None if TensorFlow does not list kernels."""
    try:
        from tensorflow.python.framework import kernels

        listed = kernels.get_registered_kernels_for_op
    except (ImportError, AttributeError):
        return None
    _list_kernels()
    kinds = sorted(kinds_of_operations(concrete) - _OF_EVERY_GRAPH)
    return [kind for kind in kinds if _FOR_GPUS not in {one.device_type for one in listed(kind).kernel}]


def _list_kernels() -> None:
    """Compiles a trivial function, since XLA registers its kernels at its first use."""
    with tf.device("CPU"):
        tf.function(tf.identity, jit_compile=True, autograph=False)(tf.constant(0.0))
