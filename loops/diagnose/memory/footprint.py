"""What a training step holds, layer by layer, under one dtype policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What a training step holds, in bytes, of a layer or of all.

    Attributes:
        weights: The model's variables, trained or not.
        masters: Float32 copies of 16-bit weights.
        slots: What the optimizer keeps; None where it is a function, which does not say.
        gradients: One for each trained variable.
        copies: Copies of weights that the backward pass reads: in 16 bits, say.
        activations: What the forward pass keeps for the backward pass, computed from the batch.
        uncounted: How many tensors are kept whose size the graph does not say.
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
        """All of it, as far as it is known: a little more than a step's peak, but for what operations use inside."""
        return self.weights + self.masters + (self.slots or 0) + self.gradients + self.copies + self.activations


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A training step under one policy.

    Attributes:
        policy: Such as "mixed_float16"; "float16" is with float32 masters.
        layers: What each layer holds, by its name, or its path where several have that name; None stands for the loss
            and all else.
        recomputed: What activations and copies come to with gradient checkpointing: those kept, and those of the
            largest block, which are there again while it is recomputed. None where the model has no blocks.
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
        """All of it with gradient checkpointing; None where the model has no blocks."""
        whole = self.all
        if self.recomputed is None:
            return None
        return whole.total - whole.copies - whole.activations + self.recomputed

    def as_dict(self) -> dict:
        """For JSON."""
        whole = self.all
        sums = {**dataclasses.asdict(whole), "total": whole.total, "total_recomputed": self.total_recomputed}
        layers = [{"layer": name, **dataclasses.asdict(one)} for name, one in self.layers.items()]
        return {"policy": self.policy, **sums, "layers": layers}


def total(parts: Sequence[Bytes]) -> Bytes:
    """The sum; slots are None if any are."""
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
