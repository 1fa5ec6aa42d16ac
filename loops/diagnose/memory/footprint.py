"""The memory of a training step, layer by layer, under one dtype policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The memory that a training step needs, in bytes, for a layer or for all.

    Attributes:
        weights: The model's variables, trained or not.
        masters: Float32 copies of 16-bit weights.
        slots: The optimizer's variables; None if the optimizer is a function, whose variables are unknown.
        gradients: The gradients of the trained variables.
        copies: Copies of weights that the backward pass reads, such as weights cast to 16 bits.
        activations: Tensors computed from the batch that the forward pass saves for the backward pass.
        uncounted: The number of saved tensors whose static shape is unknown.
    """

    weights: int = 0
    masters: int = 0
    slots: int | None = 0
    gradients: int = 0
    copies: int = 0
    activations: int = 0
    uncounted: int = 0

    @property
    def total(self) -> int:
        """The sum of all known bytes: slightly above the peak of a step, without the workspace of operations."""
        return self.weights + self.masters + (self.slots or 0) + self.gradients + self.copies + self.activations


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The memory of a training step under one policy.

    Attributes:
        policy: The policy, such as "mixed_float16"; "float16" is counted with float32 masters.
        layers: The bytes of each layer, by its name, or by its path where several layers have that name; None stands
            for the loss and everything else.
        recomputed: The bytes of activations and copies with gradient checkpointing: those saved, plus those of the
            largest block while it is recomputed. None if the model has no blocks.
    """

    policy: str
    layers: Mapping[str | None, Bytes]
    recomputed: int | None = None

    @property
    def all(self) -> Bytes:
        """The sum over the layers."""
        return total(list(self.layers.values()))

    @property
    def total_recomputed(self) -> int | None:
        """The sum of all known bytes with gradient checkpointing; None if the model has no blocks."""
        whole = self.all
        if self.recomputed is None:
            return None
        return whole.total - whole.copies - whole.activations + self.recomputed

    def as_dict(self) -> dict:
        """The footprint as values for JSON."""
        whole = self.all
        sums = {**dataclasses.asdict(whole), "total": whole.total, "total_recomputed": self.total_recomputed}
        layers = [{"layer": name, **dataclasses.asdict(one)} for name, one in self.layers.items()]
        return {"policy": self.policy, **sums, "layers": layers}


def total(parts: Sequence[Bytes]) -> Bytes:
    """The sum of several; its slots are None if those of any are."""
    slots = [one.slots for one in parts]
    return Bytes(
        weights=sum(one.weights for one in parts),
        masters=sum(one.masters for one in parts),
        slots=None if None in slots else sum(one or 0 for one in slots),
        gradients=sum(one.gradients for one in parts),
        copies=sum(one.copies for one in parts),
        activations=sum(one.activations for one in parts),
        uncounted=sum(one.uncounted for one in parts),
    )
