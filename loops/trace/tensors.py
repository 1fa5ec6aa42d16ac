"""What a trace has to know of each tensor that a step's probes measure."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import scaler

_SCALED = ("activation_gradients", "weight_gradients")
_FLOAT32 = ("updates", "slots")
_FORMATS = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is measured at every step.

    Attributes:
        name: Such as "activation_gradients/dense_1".
        format: The name of the format that its values were computed in, which decides what overflows.
        carries_scale: Whether its values are multiplied by the loss scale, as the gradients of a scaled loss are.
    """

    name: str
    format: str
    carries_scale: bool

    @functools.cached_property
    def limits(self) -> scaler.FloatFormat:
        """The limits of its format."""
        return scaler.float_format(self.format)


def tensors_of(train_step: Any) -> list[Tensor]:
    """What the probes of a train step measure; nothing where it has none.

    The format is that in which the tensor's layer computes, for a variable and its gradient, too: there they overflow,
    also where the variable is float32. Updates and the optimizer's slots are float32.

    Args:
        train_step: That of a loop, traced.
    """
    probes = getattr(train_step, "probes", None)
    if probes is None:
        return []
    formats = {path: layer.compute_dtype for path, layer in scaler.observe.layers_by_path(probes.model).items()}
    # What is probed by hand lies in a layer that nobody names.
    usual = "float16" if "float16" in formats.values() else probes.model.compute_dtype
    return [_tensor(name, formats, usual) for name in probes.names]


def _tensor(name: str, formats: dict[str, str], usual: str) -> Tensor:
    kind, _, path = name.partition("/")
    found = formats.get(path) or formats.get(path.rpartition("/")[0]) or usual
    # Whole numbers are what a layer of text computes in.
    found = found if found in _FORMATS and kind not in _FLOAT32 else "float32"
    return Tensor(name, found, kind in _SCALED)
