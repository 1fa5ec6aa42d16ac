"""A model, its layers or its loss in another dtype for as long as a function is traced."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import in_policy

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16")
"""Those that are compared."""


def own_policy(model: keras.Model) -> str:
    """The policy of the layers that hold most of the weights. A model around them may have another one."""
    counted: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    for layer in reversed(scaler.observe.layers_of(model)):  # Variables are of the innermost layer that has them.
        own = [variable for variable in layer.variables if id(variable) not in seen]
        seen.update(map(id, own))
        counted[layer.dtype_policy.name] += sum(math.prod(variable.shape) for variable in own)
    return counted.most_common(1)[0][0]


def following(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers that would change with the model's policy: those that have it now. Others were given their own."""
    own = own_policy(model)
    return [
        layer
        for layer in scaler.observe.layers_of(model)
        if layer.dtype_policy.name == own and not isinstance(layer, keras.layers.InputLayer)
    ]


@contextlib.contextmanager
def under(model: keras.Model, policy: str) -> Iterator[None]:
    """Has a model compute under another policy; its variables keep their dtype.

    Args:
        model: Its layers that were given a policy of their own keep it.
        policy: As Keras names it; the model's own changes nothing.
    """
    if policy == own_policy(model):
        yield
        return
    with in_policy(following(model), policy):
        yield


def loss_in_float32(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that is given predictions of 16 bits in float32, as a model in 16 bits would have its last layer."""
    if isinstance(loss, keras.losses.Loss):
        return loss  # It casts by itself, and a `TrainStep` treats it in its own way.

    def wide(y: Any, prediction: Any, *weight: Any) -> Any:
        return loss(y, tf.nest.map_structure(_wide, prediction), *weight)

    return wide


def _wide(tensor: Any) -> Any:
    narrow = tf.is_tensor(tensor) and tensor.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(tensor, tf.float32) if narrow else tensor


class _InFloat32(keras.DTypePolicy):
    """Computes in float32, on variables of the dtype they have."""

    def __init__(self, variable_dtype: str):
        super().__init__("float32")
        self._kept = variable_dtype

    @property
    def variable_dtype(self) -> str:
        """That of the layer's own policy. Where it is not float32, Keras casts what the layer reads."""
        return self._kept


@contextlib.contextmanager
def layers_in_float32(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Has these layers compute in float32 while a function is traced."""
    before = []
    try:
        for layer in layers:
            if layer.compute_dtype == "float16":
                before.append((layer, layer.dtype_policy))
                layer.dtype_policy = _InFloat32(layer.variable_dtype)
        yield
    finally:
        for layer, policy in reversed(before):
            layer.dtype_policy = policy
