"""Each system's rule a second time, in plain Python, from its source and not from `scaler.presets`.

An original is made with a preset's arguments; `step(finite)` returns the scale after that step, a float. Those that
keep their scale in float32 do their arithmetic in np.float32, the others in Python's floats. `Raises` is what they
raise at the end of their rope.
"""

import inspect
import math

import numpy as np

f32 = np.float32
TINY = float(np.finfo(np.float32).tiny)
HUGE = float(np.finfo(np.float32).max)


class Raises(Exception):
    """The original raises here."""


class Torch:
    """aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp: a product in double, narrowed."""

    def __init__(self, initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.scale, self.tracker = f32(initial_scale), 0
        self.growth, self.backoff, self.interval = growth_factor, backoff_factor, growth_interval

    def step(self, finite):
        if not finite:
            self.scale, self.tracker = f32(float(self.scale) * self.backoff), 0
        else:
            successful = self.tracker + 1
            if successful == self.interval:
                grown = f32(float(self.scale) * self.growth)
                self.scale = grown if np.isfinite(grown) else self.scale
                successful = 0
            self.tracker = successful
        return float(self.scale)


class Nemo(Torch):
    """nemo/collections/nlp/parts/nlp_overrides.py."""

    def __init__(self, hysteresis=1, **arguments):
        super().__init__(**arguments)
        self.full = self.left = hysteresis

    def step(self, finite):
        if finite:
            self.left = self.full
            return super().step(True)
        self.left -= 1
        if self.left <= 0:
            return super().step(False)
        self.tracker = 0
        return float(self.scale)


class Apex:
    """apex/amp/scaler.py, before its removal."""

    def __init__(self, initial_scale=2.0**16, growth_interval=2000, min_scale=None, max_scale=2.0**24):
        self.scale, self.unskipped = min(max_scale, initial_scale), 0
        self.interval, self.low, self.high = growth_interval, min_scale, max_scale

    def step(self, finite):
        if not finite:
            self.scale = self.scale / 2.0
            if self.low:
                self.scale = max(self.low, self.scale)
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.interval:
            self.scale, self.unskipped = min(self.high, self.scale * 2.0), 0
        return self.scale


class DeepSpeed:
    """deepspeed/runtime/fp16/loss_scaler.py."""

    stable = staticmethod(lambda iteration, last, window: iteration - last > 1 and (iteration - last - 1) % window == 0)

    def __init__(
        self,
        initial_scale=2.0**16,
        growth_factor=2.0,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
        consecutive_hysteresis=False,
    ):
        self.scale, self.factor, self.window, self.low = initial_scale, growth_factor, growth_interval, min_scale
        self.shift = self.hysteresis = hysteresis
        self.consecutive, self.iteration, self.last = consecutive_hysteresis, 0, -1

    def step(self, finite):
        if not finite:
            if self.shift == 1 or self.hysteresis == 1:
                if self.scale == self.low:
                    raise Raises
                self.scale = max(self.scale / self.factor, self.low)
            else:
                self.hysteresis -= 1
            self.last = self.iteration
        else:
            if self.consecutive:
                self.hysteresis = self.shift
            if self.stable(self.iteration, self.last, self.window):
                if not self.consecutive:
                    self.hysteresis = self.shift
                self.scale *= self.factor
        self.iteration += 1
        return self.scale


class DeepSpeed202502(DeepSpeed):
    """The same file on 2025-02-21."""

    stable = staticmethod(lambda iteration, last, window: (iteration - last) % window == 0)


class Megatron:
    """megatron/core/optimizer/grad_scaler.py: float32 tensors throughout."""

    def __init__(
        self,
        initial_scale=2.0**32,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=1.0,
        hysteresis=2,
    ):
        self.scale, self.low = f32(initial_scale), f32(min_scale)
        self.growth, self.backoff, self.interval = f32(growth_factor), f32(backoff_factor), growth_interval
        self.full = self.left = hysteresis
        self.tracker = 0

    def step(self, finite):
        if not finite:
            self.tracker = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * self.backoff, self.low)
        else:
            self.tracker += 1
            if self.tracker == self.interval:
                self.tracker, self.left = 0, self.full
                self.scale = self.scale * self.growth
        return float(self.scale)


class ColossalAI:
    """colossalai/amp/naive_amp/grad_scaler/dynamic_grad_scaler.py."""

    def __init__(
        self,
        initial_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        min_scale=None,
        max_scale=None,
        hysteresis=2,
    ):
        self.scale = f32(initial_scale)
        self.low, self.high = min_scale and f32(min_scale), max_scale and f32(max_scale)
        self.growth, self.backoff, self.interval = f32(growth_factor), f32(backoff_factor), growth_interval
        self.hysteresis, self.overflows, self.good = hysteresis, 0, 0

    def step(self, finite):
        if not finite:
            self.overflows += 1
            self.good = 0
            if self.overflows >= self.hysteresis:
                self.scale = self.scale * self.backoff
                if self.low:
                    self.scale = max(self.scale, self.low)
        else:
            self.good += 1
            if self.good == self.interval:
                self.good = self.overflows = 0
                self.scale = self.scale * self.growth
                if self.high:
                    self.scale = min(self.scale, self.high)
        return float(self.scale)


class Fairseq:
    """fairseq/optim/dynamic_loss_scaler.py."""

    def __init__(
        self,
        initial_scale=2.0**15,
        growth_factor=2.0,
        growth_interval=2000,
        tolerance=0.0,
        threshold=None,
        min_loss_scale=1e-4,
    ):
        self.scale, self.factor, self.window = initial_scale, growth_factor, growth_interval
        self.tolerance, self.threshold, self.low = tolerance, threshold, min_loss_scale
        self.iteration, self.last_overflow, self.last_rescale, self.overflows = 0, -1, -1, 0

    def step(self, finite):
        if finite:
            if (self.iteration - self.last_overflow) % self.window == 0:
                self.scale *= self.factor
                self.last_rescale = self.iteration
                self.grown()
        else:
            before = self.scale
            since = self.iteration - self.last_rescale
            self.last_overflow = self.iteration
            self.overflows += 1
            if self.overflows / float(since) >= self.tolerance:
                self.scale /= self.factor
                self.shrunk()
                if self.threshold is not None:
                    self.scale = max(self.scale, self.threshold)
                self.last_rescale = self.iteration
                self.overflows = 0
            self.check_floor(before)
        self.iteration += 1
        return self.scale

    def grown(self):
        pass

    def shrunk(self):
        pass

    def check_floor(self, before):
        if self.scale <= self.low:
            self.scale = before
            raise Raises


class Metaseq(Fairseq):
    """metaseq/optim/dynamic_loss_scaler.py."""

    def __init__(self, initial_scale=4.0, growth_interval=256, min_loss_scale=2.0**-5, **arguments):
        super().__init__(initial_scale, growth_interval=growth_interval, min_loss_scale=min_loss_scale, **arguments)

    def grown(self):
        self.window *= self.factor

    def shrunk(self):
        self.window = max(int(self.window / self.factor), 1)

    def check_floor(self, before):
        if self.scale < self.low:
            self.scale = before


class Keras:
    """keras/src/optimizers/loss_scale_optimizer.py."""

    def __init__(self, initial_scale=2.0**15, growth_interval=2000):
        self.scale, self.interval, self.counter = f32(initial_scale), growth_interval, 0

    def step(self, finite):
        if not finite:
            self.scale, self.counter = self.scale * f32(0.5), 0
        elif self.counter == self.interval - 1:
            self.scale, self.counter = self.scale * f32(2), 0
        else:
            self.counter += 1
        return float(self.scale)


class TFKeras(Keras):
    """tf_keras/mixed_precision/loss_scale_optimizer.py, with the `multiplier` that TensorFlow 1 lets a user choose."""

    def __init__(self, initial_scale=2.0**15, growth_factor=2.0, growth_interval=2000):
        super().__init__(initial_scale, growth_interval)
        self.factor = f32(growth_factor)

    def step(self, finite):
        if not finite:
            self.scale, self.counter = max(self.scale / self.factor, f32(1)), 0
        elif self.counter + 1 >= self.interval:
            grown = self.scale * self.factor
            self.scale, self.counter = grown if np.isfinite(grown) else self.scale, 0
        else:
            self.counter += 1
        return float(self.scale)


class TFContrib:
    """tensorflow/contrib/mixed_precision/python/loss_scale_manager.py."""

    def __init__(self, initial_scale, growth_interval, hysteresis=2, growth_factor=2.0, backoff_factor=0.8):
        self.scale, self.good, self.bad = f32(initial_scale), 0, 0
        self.increase_every, self.decrease_every = growth_interval, hysteresis
        self.growth, self.backoff = f32(growth_factor), f32(backoff_factor)

    def step(self, finite):
        if finite and self.good + 1 >= self.increase_every:
            grown = self.scale * self.growth
            self.scale = grown if np.isfinite(grown) else self.scale
            self.good = self.bad = 0
        elif finite:
            self.good += 1
        elif self.bad + 1 >= self.decrease_every:
            self.scale = max(f32(1), self.scale * self.backoff)
            self.good = self.bad = 0
        else:
            self.bad, self.good = self.bad + 1, 0
        return float(self.scale)


class OpenSeq2Seq:
    """open_seq2seq/optimizers/automatic_loss_scaler.py, BackoffScaler."""

    def __init__(self, max_scale=2.0**14, growth_factor=2.0, growth_interval=2000, min_scale=1.0):
        self.low, self.high, self.factor = f32(min_scale), f32(max_scale), f32(growth_factor)
        self.scale, self.window, self.iteration, self.last = self.high, growth_interval, 0, -1

    def step(self, finite):
        if not finite:
            self.scale = min(max(self.scale / self.factor, self.low), self.high)
            self.last = self.iteration
        elif (self.iteration - self.last) % self.window == 0:
            self.scale = min(max(self.scale * self.factor, self.low), self.high)
        self.iteration += 1
        return float(self.scale)


class Flax:
    """flax/training/dynamic_scale.py."""

    def __init__(
        self, initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=TINY
    ):
        self.scale, self.growth, self.backoff = f32(initial_scale), f32(growth_factor), f32(backoff_factor)
        self.interval, self.low, self.steps = growth_interval, min_scale, 0

    def step(self, finite):
        grow = self.steps == self.interval
        if finite and grow:
            self.scale = min(self.scale * self.growth, f32(HUGE))
        elif not finite:
            self.scale = self.scale * self.backoff
            if self.low is not None:
                self.scale = max(self.scale, f32(self.low))
        self.steps = 0 if grow or not finite else self.steps + 1
        return float(self.scale)


class Jmp:
    """jmp/_src/loss_scale.py."""

    def __init__(self, initial_scale=2.0**15, growth_factor=2.0, growth_interval=2000, min_scale=1.0):
        self.scale, self.factor, self.low = f32(initial_scale), f32(growth_factor), f32(min_scale)
        self.period, self.counter = growth_interval, 0

    def step(self, finite):
        if not finite:
            self.scale = max(self.low, self.scale / self.factor)
        elif self.counter == self.period - 1:
            grown = self.scale * self.factor
            self.scale = grown if np.isfinite(grown) else self.scale
        self.counter = ((self.counter + 1) % self.period) * finite
        return float(self.scale)


class MXNet:
    """python/mxnet/amp/loss_scaler.py."""

    def __init__(self, initial_scale=2.0**16, growth_interval=2000, max_scale=2.0**24):
        self.scale = self.next = initial_scale
        self.high, self.length, self.unskipped = max_scale, growth_interval, 0

    def step(self, finite):
        self.scale = self.next
        if not finite:
            self.next, self.unskipped = self.scale / 2.0, 0
        else:
            self.unskipped += 1
        if self.unskipped == self.length:
            self.unskipped, self.next = 0, min(self.high, self.scale * 2.0)
        return self.scale


class MindSpore:
    """mindspore/python/mindspore/train/loss_scale_manager.py."""

    def __init__(self, initial_scale=2.0**24, growth_factor=2.0, growth_interval=2000):
        self.scale, self.window = initial_scale, growth_interval
        self.increase, self.decrease = growth_factor, 1 / growth_factor
        self.iteration, self.last, self.bad = 1, 0, 0

    def step(self, finite):
        if not finite:
            self.scale = max(self.scale * self.decrease, 1)
            self.last = self.iteration
            self.bad += 1
        else:
            if (self.iteration - self.last) % self.window == 0:
                self.scale *= self.increase
            self.bad = 0
        if self.bad > 1000:
            raise Raises
        self.iteration += 1
        return float(self.scale)


class Paddle:
    """python/paddle/amp/grad_scaler.py, AmpScaler._update."""

    floor = 0.0

    def __init__(
        self, initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, hysteresis=1
    ):
        self.scale, self.increase, self.decrease = f32(initial_scale), f32(growth_factor), f32(backoff_factor)
        self.every, self.decrease_every, self.good, self.bad = growth_interval, hysteresis, 0, 0

    def step(self, finite):
        if not finite:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == self.decrease_every:
                self.scale, self.bad = max(self.scale * self.decrease, f32(self.floor)), 0
        else:
            self.bad, self.good = 0, self.good + 1
            if self.good == self.every:
                self.scale, self.good = self.scale * self.increase, 0
        return float(self.scale)


class PaddleStatic(Paddle):
    """paddle/phi/kernels/impl/amp_kernel_impl.h."""

    floor = 1.0


class GuidedDiffusion:
    """guided_diffusion/fp16_util.py; torch multiplies a float32 loss by a scalar in float32."""

    def __init__(self, initial_log2_scale=20.0, growth=1e-3):
        self.log2_scale, self.growth = initial_log2_scale, growth

    def step(self, finite):
        if finite:
            self.log2_scale += self.growth
        else:
            self.log2_scale -= 1
        return 2**self.log2_scale


class Chainer:
    """chainer/optimizer.py."""

    def __init__(self, interval=1000):
        self.scale, self.multiplier, self.ever = 1.0, math.pow(2.0, 1.0 / interval), False

    def step(self, finite):
        self.ever = self.ever or not finite
        multiplier = 0.5 if not finite else self.multiplier if self.ever else 2.0
        self.scale = max(1, min(65504, self.scale * multiplier))
        return float(self.scale)


class Dalle:
    """The paper, arXiv 2102.12092, appendix D."""

    def __init__(self, replicas=1):
        self.replicas, self.scale = replicas, replicas * 2.0**13
        self.updates, self.last_division = 0, -math.inf

    def step(self, finite):
        self.updates += 1
        if finite:
            self.scale *= 2 ** (1 / 1000)
        elif self.updates - self.last_division >= 125:
            self.scale /= math.sqrt(2)
            self.last_division = self.updates
        self.scale = min(max(self.scale, self.replicas * 2**7), self.replicas * 2**24)
        return float(self.scale)


class Nnabla:
    """python/src/nnabla/experimental/mixed_precision_training.py."""

    def __init__(self, initial_scale=8.0, growth_factor=2.0, growth_interval=2000):
        self.scale, self.factor, self.n, self.counter = initial_scale, growth_factor, growth_interval, 0

    def step(self, finite):
        if not finite:
            self.scale /= self.factor
            self.counter = 0
        else:
            if self.counter > self.n:
                self.scale *= self.factor
                self.counter = 0
            self.counter += 1
        return self.scale


class Optax:
    """optax.apply_if_finite: there is no scale."""

    def step(self, finite):
        return 1.0


ORIGINALS = {
    "apex": Apex,
    "chainer": Chainer,
    "colossalai": ColossalAI,
    "dalle": Dalle,
    "deepspeed": DeepSpeed,
    "deepspeed_2025_02": DeepSpeed202502,
    "fairscale": Torch,
    "fairseq": Fairseq,
    "flax": Flax,
    "guided_diffusion": GuidedDiffusion,
    "jmp": Jmp,
    "keras": Keras,
    "megatron": Megatron,
    "metaseq": Metaseq,
    "mindspore": MindSpore,
    "mxnet": MXNet,
    "nemo": Nemo,
    "nnabla": Nnabla,
    "openseq2seq_backoff": OpenSeq2Seq,
    "optax_apply_if_finite": Optax,
    "paddle": Paddle,
    "paddle_static": PaddleStatic,
    "pytorch": Torch,
    "tf_contrib": TFContrib,
    "tf_keras": TFKeras,
}


def trace(preset, arguments, word):
    """The scales after each step of a word, in float32, and how many of them count.

    They count until the original raises, or leaves the numbers whose reciprocal is a normal float32 too.
    """
    original, scales = ORIGINALS[preset](**arguments), []
    with np.errstate(over="ignore", under="ignore"):
        for finite in word:
            try:
                scale = original.step(bool(finite))
            except (Raises, OverflowError, ZeroDivisionError):
                break
            if not 2.0**-126 <= scale <= 2.0**126:
                break
            scales.append(scale)
    return np.array(scales, np.float64).astype(np.float32)


def defaults(preset):
    """A rule's own defaults, by name."""
    parameters = {}
    for kind in reversed(ORIGINALS[preset].__mro__):
        if "__init__" in vars(kind):
            parameters |= inspect.signature(kind).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
