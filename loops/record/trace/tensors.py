"""The properties of each tensor that a step's probes measure, for a trace; how to give a step probes, in words."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras

import scaler
from loops.step.parts import parts_in
from loops.step.probing import Watched, watched_by

_SCALED = ("activation_gradients", "weight_gradients")
_FLOAT32 = ("updates", "slots")
_OF_LAYERS = ("activations", "activation_gradients")
_FORMATS = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is measured at every step.

    Attributes:
        name: Such as "activation_gradients/dense_1".
        format: The name of the format that its values were computed in, which determines when they overflow.
        carries_scale: Whether its values are multiplied by the loss scale, like the gradients of a scaled loss.
        certain: Whether the format is certain. A float32 variable's gradient is measured in float32, but was computed
            in float16 or float32: a layer that computes in float16 may sum in float32, as LayerNormalization does.
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
    """The tensors that the probes of a train step measure; empty without probes.

    An activation and its gradient have the dtype that the probe saw. A variable and its gradient get the layer's
    compute dtype, in which they overflow even if the variable is float32; but then the gradient may have been computed
    in float32, so its format is uncertain. A sparse gradient is a float32 sum of the gradients of its layer's outputs,
    which is certain if these are measured, too. Updates and the optimizer's slots are float32.

    Args:
        train_step: A loop's train step, after its first trace.
    """
    return [tensor for one in watched_by(train_step) for tensor in tensors_of_watch(one)]


def tensors_of_watch(watched: Watched) -> list[Tensor]:
    """The same of one watch."""
    probes = watched.watch
    seen = getattr(probes, "dtypes", {})
    formats = {path: layer.compute_dtype for path, layer in scaler.observe.layers_by_path(probes.model).items()}
    # A probe set by hand has no layer in its name.
    usual = "float16" if "float16" in formats.values() else probes.model.compute_dtype
    products = _products(probes.model, formats, seen)
    names = set(probes.names)
    # The row of a weight has the path of its layer in the middle.
    owners = {name: name.partition("/")[2].rpartition("/")[0] for name in watched.sparse}
    summed = {name for name, layer in owners.items() if f"activation_gradients/{layer}" in names}
    found = [
        Tensor(name, "float32", True) if name in summed else _tensor(name, formats, usual, seen, products)
        for name in probes.names
    ]
    return [dataclasses.replace(tensor, name=watched.row(tensor.name)) for tensor in found]


def lacks_of(train_step: Any, replicas: int) -> list[str]:
    """Why a trace does not have the largest of the gradients that the optimizer gets; empty if it does.

    Args:
        train_step: A loop's train step, after its first trace.
        replicas: The number of replicas.

    Returns:
        "replicas" or "micro-batches" if gradients are measured before they are summed, "weights" if some gradients are
        not measured.
    """
    watches = watched_by(train_step)
    if not watches:
        return []
    moved = {part.name: part.variables for part in parts_in(train_step)}
    moved = moved or {"": watches[0].watch.model.trainable_variables}
    own = {one.part: one.watch for one in watches}
    found = {
        "replicas": replicas > 1,
        "micro-batches": getattr(train_step, "accumulate", 1) > 1,
        "weights": not all(name in own and _sees_all(own[name], variables) for name, variables in moved.items()),
    }
    return [name for name, lacks in found.items() if lacks]


def _sees_all(watch: Any, variables: list) -> bool:
    """Whether the gradients of all these variables are measured."""
    if "weight_gradients" not in getattr(watch, "kinds", _SCALED):
        return False
    holds = watch.holds() if hasattr(watch, "holds") else lambda variable: True
    known = {id(variable) for variable in watch.model.variables}
    return all(id(variable) in known and holds(variable) for variable in variables)


def _products(model: Any, formats: dict[str, str], seen: dict[str, tuple[str, ...]]) -> set[str]:
    """The paths of layers whose weight gradients are certainly computed in the layer's compute dtype.

    These are Keras's Dense layers that are called once. The gradient of a variable that is used twice is a float32 sum,
    and a user's layer may use any variable twice.
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
        # With several dtypes, it is unknown which one the largest value has.
        dtypes = set(seen[path])
        narrow = next((dtype for dtype in _FORMATS if dtype in dtypes), usual)
        return Tensor(name, narrow, kind in _SCALED, certain=len(dtypes) == 1)
    owner = path if path in formats else path.rpartition("/")[0]
    found = formats.get(owner, usual)
    # A layer for text may compute in integers.
    found = found if found in _FORMATS else "float32"
    certain = kind != "weight_gradients" or found == "float32" or owner in products
    return Tensor(name, found, kind in _SCALED, certain)


def probes_for(parts: Sequence[str]) -> str:
    """The argument that watches a step: of a `TrainStep`, or of a `ComposedStep` by the names of its parts.

    Args:
        parts: The names of its parts; empty for a `TrainStep`, or if the step is unknown.
    """
    if not parts:
        return "TrainStep(..., probes=hs.observe.watch(model))"
    each = ", ".join(f'"{part}": hs.observe.watch({part})' for part in parts)
    return f"ComposedStep(..., probes={{{each}}})"
