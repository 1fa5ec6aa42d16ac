"""Other systems' loss scalers, step for step.

`presets.pytorch()` is a strategy whose scale after every step is that of `torch.amp.GradScaler`, for any sequence of
finite and non-finite steps. Each function takes its system's parameters under this package's names and has its
system's defaults. A preset copies the rule, quirks included, and not the damage: the scale stays in [2^-126, 2^126] or
in the system's tighter bounds, and the docstring says from where on the two part. What a system raises, its `_stuck`
companion raises. docs/presets.md has all of them in one table, with their sources.
"""

from scaler.presets.other_systems import chainer as chainer
from scaler.presets.other_systems import flax as flax
from scaler.presets.other_systems import jmp as jmp
from scaler.presets.other_systems import keras as keras
from scaler.presets.other_systems import mindspore as mindspore
from scaler.presets.other_systems import mindspore_stuck as mindspore_stuck
from scaler.presets.other_systems import mxnet as mxnet
from scaler.presets.other_systems import nnabla as nnabla
from scaler.presets.other_systems import openseq2seq_backoff as openseq2seq_backoff
from scaler.presets.other_systems import optax_apply_if_finite as optax_apply_if_finite
from scaler.presets.other_systems import optax_apply_if_finite_stuck as optax_apply_if_finite_stuck
from scaler.presets.other_systems import paddle as paddle
from scaler.presets.other_systems import paddle_static as paddle_static
from scaler.presets.other_systems import tf_contrib as tf_contrib
from scaler.presets.other_systems import tf_keras as tf_keras
from scaler.presets.torch_systems import apex as apex
from scaler.presets.torch_systems import colossalai as colossalai
from scaler.presets.torch_systems import dalle as dalle
from scaler.presets.torch_systems import deepspeed as deepspeed
from scaler.presets.torch_systems import deepspeed_2025_02 as deepspeed_2025_02
from scaler.presets.torch_systems import deepspeed_stuck as deepspeed_stuck
from scaler.presets.torch_systems import fairscale as fairscale
from scaler.presets.torch_systems import fairseq as fairseq
from scaler.presets.torch_systems import fairseq_stuck as fairseq_stuck
from scaler.presets.torch_systems import guided_diffusion as guided_diffusion
from scaler.presets.torch_systems import megatron as megatron
from scaler.presets.torch_systems import metaseq as metaseq
from scaler.presets.torch_systems import nemo as nemo
from scaler.presets.torch_systems import pytorch as pytorch

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
