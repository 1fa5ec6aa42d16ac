"""What a trace has to know of each tensor that a step's probes measure."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras

import scaler

_SCALED = ("activation_gradients", "weight_gradients")
_FLOAT32 = ("updates", "slots")
_OF_LAYERS = ("activations", "activation_gradients")
_FORMATS = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is measured at every step.

    Attributes:
        name: Such as "activation_gradients/dense_1".
        format: The name of the format that its values were computed in, which decides what overflows.
        carries_scale: Whether its values are multiplied by the loss scale, as the gradients of a scaled loss are.
        certain: Whether that is known. A float32 variable's gradient is float32 once it is measured, and was computed
            in float16 or in float32: a layer that computes in float16 may still sum in float32, as
            LayerNormalization does.
    """

    name: str
    format: str
    carries_scale: bool
    certain: bool = True

    @functools.cached_property
    def limits(self) -> scaler.FloatFormat:
        """The limits of its format."""
        return scaler.float_format(self.format)


def tensors_of(train_step: Any) -> list[Tensor]:
    """What the probes of a train step measure; nothing where it has none.

    An activation and its gradient have the dtype that the probe saw. Of a variable and its gradient the format is that
    in which the layer computes: there they overflow, also where the variable is float32; but then the gradient may have
    been computed in float32, which is not certain. A sparse gradient is a float32 sum of the gradients of its layer's
    outputs, which is certain where these are measured, too. Updates and the optimizer's slots are float32.

    Args:
        train_step: That of a loop, traced.
    """
    probes = getattr(train_step, "probes", None)
    if probes is None:
        return []
    seen = getattr(probes, "dtypes", {})
    formats = {path: layer.compute_dtype for path, layer in scaler.observe.layers_by_path(probes.model).items()}
    # What is probed by hand lies in a layer that nobody names.
    usual = "float16" if "float16" in formats.values() else probes.model.compute_dtype
    products = _products(probes.model, formats, seen)
    sparse, names = getattr(train_step, "sparse_gradients", ()), set(probes.names)
    summed = {name for name in sparse if f"activation_gradients/{_layer_of(name)}" in names}
    return [
        Tensor(name, "float32", True) if name in summed else _tensor(name, formats, usual, seen, products)
        for name in probes.names
    ]


def _layer_of(name: str) -> str:
    """The path of the layer that has the weight of a row."""
    return name.partition("/")[2].rpartition("/")[0]


def lacks_of(train_step: Any, replicas: int) -> list[str]:
    """Why the largest of a step's gradients, as its optimizer would get them, is not in its trace; [] where it is.

    Args:
        train_step: That of a loop, traced.
        replicas: On which it runs.

    Returns:
        Some of "replicas" and "micro-batches", whose gradients are measured before they are summed, and "weights": the
        gradients of some are not measured.
    """
    probes = getattr(train_step, "probes", None)
    if probes is None:
        return []
    holds = probes.holds() if hasattr(probes, "holds") else lambda variable: True
    measured = "weight_gradients" in getattr(probes, "kinds", _SCALED)
    found = {
        "replicas": replicas > 1,
        "micro-batches": getattr(train_step, "accumulate", 1) > 1,
        "weights": not (measured and all(holds(variable) for variable in probes.model.trainable_variables)),
    }
    return [name for name, lacks in found.items() if lacks]


def _products(model: Any, formats: dict[str, str], seen: dict[str, tuple[str, ...]]) -> set[str]:
    """The paths of layers whose weight gradients are products and sums in their own format, and nothing else.

    They are Dense layers of Keras that are called once. A variable that is used twice has a float32 sum for its
    gradient, and the code of a user may use any variable twice.
    """
    layers = scaler.observe.layers_by_path(model)
    everything = [model, *layers.values()]
    if any(
        not type(layer).__module__.startswith("keras.") or isinstance(layer, keras.layers.Lambda)
        for layer in everything
    ):
        return set()
    return {
        path
        for path, layer in layers.items()
        if type(layer) is keras.layers.Dense
        and seen.get(path) == (formats[path],)
        and layer.kernel_regularizer is None
        and layer.bias_regularizer is None
    }


def _tensor(
    name: str, formats: dict[str, str], usual: str, seen: dict[str, tuple[str, ...]], products: set[str]
) -> Tensor:
    kind, _, path = name.partition("/")
    if kind in _FLOAT32:
        return Tensor(name, "float32", False)
    if kind in _OF_LAYERS and path in seen:
        # Of several dtypes the row does not say which one its largest value has.
        dtypes = set(seen[path])
        narrow = next((dtype for dtype in _FORMATS if dtype in dtypes), usual)
        return Tensor(name, narrow, kind in _SCALED, certain=len(dtypes) == 1)
    owner = path if path in formats else path.rpartition("/")[0]
    found = formats.get(owner, usual)
    # Whole numbers are what a layer of text computes in.
    found = found if found in _FORMATS else "float32"
    certain = kind != "weight_gradients" or found == "float32" or owner in products
    return Tensor(name, found, kind in _SCALED, certain)
