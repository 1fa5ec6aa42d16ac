"""Other systems' loss scalers, step for step.

`presets.pytorch()` is a strategy whose scale after every step is that of `torch.amp.GradScaler`, for any sequence of
finite and non-finite steps. Each function takes its system's parameters under this package's names and has its
system's defaults. A preset copies the rule, quirks included, and not the damage: the scale stays in [2^-126, 2^126] or
in the system's tighter bounds, and the docstring says from where on the two part. What a system raises, its `_stuck`
companion raises. docs/presets.md has all of them in one table, with their sources.
"""

from scaler.presets.other_systems import (
    chainer,
    flax,
    jmp,
    keras,
    mindspore,
    mindspore_stuck,
    mxnet,
    nnabla,
    openseq2seq_backoff,
    optax_apply_if_finite,
    optax_apply_if_finite_stuck,
    paddle,
    paddle_static,
    tf_contrib,
    tf_keras,
)
from scaler.presets.torch_systems import (
    apex,
    colossalai,
    dalle,
    deepspeed,
    deepspeed_2025_02,
    deepspeed_stuck,
    fairscale,
    fairseq,
    fairseq_stuck,
    guided_diffusion,
    megatron,
    metaseq,
    nemo,
    pytorch,
)

__all__ = [
    "apex",
    "chainer",
    "colossalai",
    "dalle",
    "deepspeed",
    "deepspeed_2025_02",
    "deepspeed_stuck",
    "fairscale",
    "fairseq",
    "fairseq_stuck",
    "flax",
    "guided_diffusion",
    "jmp",
    "keras",
    "megatron",
    "metaseq",
    "mindspore",
    "mindspore_stuck",
    "mxnet",
    "nemo",
    "nnabla",
    "openseq2seq_backoff",
    "optax_apply_if_finite",
    "optax_apply_if_finite_stuck",
    "paddle",
    "paddle_static",
    "pytorch",
    "tf_contrib",
    "tf_keras",
]
