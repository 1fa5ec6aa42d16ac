"""PyTorch's fused optimizers with its GradScaler on the CPU, as a contender where it is installed.

It is no dependency of this project, and has no master weights: it takes part with float32 gradients only.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable

import numpy as np

NAME = "PyTorch fused, GradScaler"


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def step(values: list[np.ndarray], weights: list[np.ndarray], optimizer: str, clip: float | None) -> Callable[[], None]:
    """A step that takes the gradients' arrays, as they are, to be gradients of a scaled loss."""
    # Triton, which nothing here uses, and TensorFlow each bring LLVM: loading both ends the process.
    sys.modules.setdefault("triton", None)
    import torch

    parameters = [torch.nn.Parameter(torch.from_numpy(value.copy())) for value in weights]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.from_numpy(value.copy())
    make = {
        "Adam": functools.partial(torch.optim.Adam, lr=1e-3, fused=True),
        "SGD momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    }[optimizer]
    chosen = make(parameters)
    # Gradients are unscaled in place: with a scale of 1 they stay what they are, at the same cost.
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2**30)

    def take() -> None:
        # The scaler wants to have scaled a loss before it steps.
        grad_scaler.scale(torch.zeros(()))
        if clip is not None:
            grad_scaler.unscale_(chosen)
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        grad_scaler.step(chosen)
        grad_scaler.update()

    return take
