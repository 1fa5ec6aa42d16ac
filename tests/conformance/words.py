"""Random words of finite and non-finite steps, random arguments, and all of a preset's traces in one compiled loop."""

import functools

import numpy as np
import tensorflow as tf
from rigs import scales_of

from scaler import presets

STEPS, WORDS = 80, 168
COUNTS = {"growth_interval", "hysteresis"}

# What is varied of each preset, and what each variant holds fixed.
CASES = {
    "apex": ("initial_scale growth_interval min_scale max_scale", [{}]),
    "chainer": ("", [{"interval": 1}, {"interval": 3}]),
    "colossalai": ("initial_scale growth_factor backoff_factor growth_interval min_scale max_scale hysteresis", [{}]),
    "dalle": ("", [{"replicas": 48}]),
    "deepspeed": (
        "initial_scale growth_factor growth_interval min_scale hysteresis",
        [{"consecutive_hysteresis": flag} for flag in (False, True)],
    ),
    "deepspeed_2025_02": (
        "initial_scale growth_factor growth_interval min_scale hysteresis",
        [{"consecutive_hysteresis": flag} for flag in (False, True)],
    ),
    "fairscale": ("initial_scale growth_factor backoff_factor growth_interval", [{}]),
    "fairseq": ("initial_scale growth_factor growth_interval tolerance min_loss_scale", [{}, {"threshold": 0.7}]),
    "flax": ("initial_scale growth_factor backoff_factor growth_interval min_scale", [{}]),
    "guided_diffusion": ("initial_log2_scale growth", [{}]),
    "jmp": ("initial_scale growth_factor growth_interval min_scale", [{}]),
    "keras": ("initial_scale growth_interval", [{}]),
    "megatron": ("initial_scale growth_factor backoff_factor growth_interval min_scale hysteresis", [{}]),
    "metaseq": ("initial_scale growth_factor growth_interval tolerance min_loss_scale", [{"threshold": 0.7}]),
    "mindspore": ("growth_factor growth_interval", [{"initial_scale": 1234.567}]),
    "mxnet": ("initial_scale growth_interval max_scale", [{}]),
    "nemo": ("initial_scale growth_factor backoff_factor growth_interval hysteresis", [{}]),
    "nnabla": ("initial_scale growth_factor growth_interval", [{}]),
    "openseq2seq_backoff": ("growth_factor growth_interval min_scale max_scale", [{}]),
    "optax_apply_if_finite": ("", [{}]),
    "paddle": ("initial_scale growth_factor backoff_factor growth_interval hysteresis", [{}]),
    "paddle_static": ("initial_scale growth_factor backoff_factor growth_interval hysteresis", [{}]),
    "pytorch": ("initial_scale growth_factor backoff_factor growth_interval", [{}]),
    "tf_contrib": ("initial_scale growth_factor backoff_factor growth_interval hysteresis", [{}]),
    "tf_keras": ("initial_scale growth_factor growth_interval", [{}]),
}
# Systems that refuse a first scale outside the bounds.
ORDERED = {"colossalai", "megatron", "mxnet"}


def random_words(rng, steps=STEPS, words=WORDS):
    """Words of the shape [steps, words], from nearly all non-finite to nearly all finite."""
    return rng.random((steps, words)) < rng.permutation(np.linspace(0.03, 1.0, words))


def a_scale(rng):
    """A float that is a power of two, any float32 or any double; rarely near the ends of the range."""
    exponent = rng.integers(-126, 127) if rng.random() < 0.2 else rng.integers(-12, 40)
    mantissa = rng.choice([1.0, 1.0 + float(np.float32(rng.random())) / 2, 1 + rng.random()])
    return float(np.clip(mantissa * 2.0**exponent, 2.0**-126, 2.0**126))


def a_growth(rng):
    """A factor above 1."""
    return float(rng.choice([2.0, 2.0, 4.0, 1.5, 3.0, 1.1, 1 + rng.random(), 1.001]))


def a_backoff(rng):
    """A factor below 1."""
    return float(rng.choice([0.5, 0.5, 0.25, 0.8, 0.3, 0.99, rng.uniform(0.01, 0.999)]))


ARGUMENTS = {
    "initial_scale": a_scale,
    "growth_factor": a_growth,
    "backoff_factor": a_backoff,
    "growth_interval": lambda rng: int(rng.integers(1, 13)),
    "hysteresis": lambda rng: int(rng.integers(1, 5)),
    "tolerance": lambda rng: float(rng.choice([0.0, 0.05, 0.4, 1 / 3, 1.0, 1.7])),
    "threshold": lambda rng: float(rng.choice([0.25, 1.0, 3.3, 2.0**-20])),
    "min_loss_scale": lambda rng: float(rng.choice([1e-4, 2.0**-5, 0.7, 0.0])),
    "initial_log2_scale": lambda rng: float(rng.choice([20.0, 0.0, 3.7, -125.5, rng.uniform(-126, 126)])),
    "growth": lambda rng: float(rng.choice([1e-3, 0.3, 1.0, rng.random()])),
}
BOUNDS = {"min_scale", "max_scale"}


def one_set(rng, names, ordered):
    """Arguments for one word; bounds are put around the first scale where the original insists on it."""
    drawn = {name: ARGUMENTS[name](rng) for name in names if name not in BOUNDS}
    bounds = sorted([a_scale(rng), a_scale(rng)])
    if ordered and "initial_scale" in drawn:
        bounds[0], drawn["initial_scale"], bounds[1] = sorted([*bounds, drawn["initial_scale"]])
    return drawn | {name: bounds[name == "max_scale"] for name in names if name in BOUNDS}


def arguments(rng, names, ordered, words=WORDS):
    """As many sets, as a dict of lists."""
    sets = [one_set(rng, names, ordered) for _ in range(words)]
    return {name: [one[name] for one in sets] for name in names}


@functools.cache
def compiled(preset, fixed, names):
    """A loop over any number of words that takes the named arguments as tensors, so that it is traced once."""
    # In double precision, so that nothing is rounded on the way.
    kinds = {name: tf.int32 if name in COUNTS else tf.float64 for name in names}
    specs = {name: tf.TensorSpec([None], kind) for name, kind in kinds.items()}

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.bool), specs], autograph=False)
    def scales(finite, varied):
        return scales_of(getattr(presets, preset)(**dict(fixed), **varied), finite)

    return lambda finite, varied: scales(finite, {name: tf.constant(varied[name], kinds[name]) for name in names})


def scales(preset, finite, fixed, varied):
    """A preset's scales for words of the shape [steps, words], whose arguments are fixed or a dict of lists."""
    return compiled(preset, tuple(fixed.items()), tuple(varied))(finite, varied).numpy()
