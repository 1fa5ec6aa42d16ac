"""The same layers in float32: on the same variables, for as long as a trace takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import keras


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
def in_float32(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
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
