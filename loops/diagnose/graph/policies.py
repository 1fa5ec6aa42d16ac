"""Runs a model, its layers or its loss in another dtype while a function is traced."""

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
"""The policies that are compared."""


def own_policy(model: keras.Model) -> str:
    """The policy of the layers with most of the weights. The model around them may have another one."""
    counted: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    for layer in reversed(scaler.observe.layers_of(model)):  # A variable belongs to the innermost layer that has it.
        own = [variable for variable in layer.variables if id(variable) not in seen]
        seen.update(map(id, own))
        counted[layer.dtype_policy.name] += sum(math.prod(variable.shape) for variable in own)
    return counted.most_common(1)[0][0]


def following(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers with the model's own policy, which would change with it. Others were given a policy explicitly."""
    own = own_policy(model)
    return [
        layer
        for layer in scaler.observe.layers_of(model)
        if layer.dtype_policy.name == own and not isinstance(layer, keras.layers.InputLayer)
    ]


@contextlib.contextmanager
def under(model: keras.Model, policy: str) -> Iterator[None]:
    """Runs a model under another policy; its variables keep their dtype.

    Args:
        model: The model. Layers that were given another policy keep it.
        policy: Keras's name of the policy; the model's own changes nothing.
    """
    if policy == own_policy(model):
        yield
        return
    with in_policy(following(model), policy):
        yield


def loss_in_float32(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that casts 16-bit predictions to float32 first, as if the model's last layer were in float32."""
    if isinstance(loss, keras.losses.Loss):
        return loss  # It casts by itself, and `TrainStep` handles it as a keras Loss.

    def wide(y: Any, prediction: Any, *weight: Any) -> Any:
        return loss(y, tf.nest.map_structure(_wide, prediction), *weight)

    return wide


def _wide(tensor: Any) -> Any:
    narrow = tf.is_tensor(tensor) and tensor.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(tensor, tf.float32) if narrow else tensor


class _InFloat32(keras.DTypePolicy):
    """Computes in float32, with variables that keep their dtype."""

    def __init__(self, variable_dtype: str):
        super().__init__("float32")
        self._kept = variable_dtype

    @property
    def variable_dtype(self) -> str:
        """The variable dtype of the layer's own policy. Keras casts variables to float32 when the layer reads them."""
        return self._kept


@contextlib.contextmanager
def layers_in_float32(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Runs the float16 layers among these in float32 while a function is traced."""
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
