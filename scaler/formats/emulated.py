"""Training in a format that the machine does not have: the products of layers with rounded operands."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator

import keras
import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.layers import layers_by_path
from scaler.errors import InvalidArgument
from scaler.formats.accumulators import ACCUMULATORS, CHUNK, Accumulator
from scaler.formats.layers import EMULATED_BY, einsum, emulate, hook_of, product_of, undo
from scaler.formats.tensors import LAYOUTS, TensorFormat
from scaler.strategies import DelayedAmax

FORMATS = tuple(LAYOUTS)
"""Every format that `emulated` takes."""
_TENSORS = ("activations", "weights", "gradients")


@dataclasses.dataclass(frozen=True)
class Emulated:
    """What `emulated` returns: call it with a model to train that in the format.

    Attributes:
        format: That of weights and activations.
        gradients: That of the gradients of products.
        scaling: "current", the strategy of delayed scaling, or None if no format needs it.
        stochastic: Which tensors are rounded at random.
        seed: For that.
        accumulators: The format that sums of products are rounded to, or None for float32 as the device adds.
        chunk: How many products are summed in float32 before each addition to such a sum, or None without one.
    """

    format: str
    gradients: str
    scaling: str | DelayedAmax | None
    stochastic: tuple[str, ...] = ()
    seed: int = 0
    accumulators: str | None = None
    chunk: int | None = None

    def __call__(self, model: keras.layers.Layer, only: Collection[str] | None = None) -> keras.layers.Layer:
        """Makes the products of a model's layers round their operands, and returns the model.

        The layers are those that `layers_of` finds. Their weights stay as they are and are what the optimizer moves. A
        model that is saved and loaded, or cloned, is an ordinary one: call this again.

        Args:
            model: A model, or one layer. For delayed scaling it is built: each layer gets variables for its scales,
                `non_trainable_variables` that a checkpoint holds and a skipped step puts back. Call it before a step is
                made for the model, which may have listed its variables.
            only: Paths of the layers to change, as `layers_of` names them; all of them if not given.

        Raises:
            InvalidArgument: If there is no such layer, for a layer that is emulated already or quantized by Keras, and
                for one without weights yet in delayed scaling.
        """
        strategy = self.scaling if isinstance(self.scaling, DelayedAmax) else None
        chosen = self._chosen(model, only)
        emulate(chosen, self.tensors, strategy, self._accumulator)
        for layer in chosen.values():
            object.__setattr__(layer, EMULATED_BY, self)
        return model

    def _chosen(self, model: keras.layers.Layer, only: Collection[str] | None) -> dict[str, keras.layers.Layer]:
        """The layers to change, by path."""
        if not isinstance(model, keras.layers.Layer):
            raise InvalidArgument(
                f"emulated(...)({model!r}): expected a Keras model or layer. Pass the model of a step, and each of "
                "several models by itself."
            )
        chosen = self.layers_of(model)
        if only is not None:
            if isinstance(only, str) or not only:
                raise InvalidArgument(f"only={only!r}: expected a list of paths, such as {list(chosen)[:2]!r}.")
            for path in only:
                if path not in chosen:
                    raise InvalidArgument(
                        f"only={path!r}: no layer that can be emulated. Expected some of {', '.join(chosen)}."
                    )
            chosen = {path: layer for path, layer in chosen.items() if path in only}
        if not chosen:
            raise InvalidArgument(
                f"{model.name}: expected a model with a Dense, EinsumDense, Conv1D, Conv2D, Conv3D or "
                "MultiHeadAttention layer. A subclass that replaces their call is left alone."
            )
        return chosen

    @contextlib.contextmanager
    def tried(self, model: keras.layers.Layer, only: Collection[str] | None = None) -> Iterator[None]:
        """The same until the end of a `with` block, to measure what it does. Delayed scaling is current scaling here.

        Args:
            model: A model, or one layer.
            only: Paths of the layers to change.

        Raises:
            InvalidArgument: As for a call.
        """
        chosen = self._chosen(model, only)
        emulate(chosen, self.tensors, None, self._accumulator)
        try:
            yield
        finally:
            undo(chosen.values())

    def layers_of(self, model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
        """The layers that it would change, by their paths as in `scaler.observe.layers_by_path`.

        They are Dense, EinsumDense, Conv1D, Conv2D and Conv3D, and the two products inside of MultiHeadAttention.
        """
        return {path: layer for path, layer in layers_by_path(model).items() if hook_of(layer) is not None}

    @no_autograph
    def einsum(self, equation: str, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        """`tf.einsum` of two rounded operands, for a layer of your own: the right one counts as the weights.

        Args:
            equation: As of `tf.einsum`, with a result: "...i,ij->...j".
            left: Of any floating dtype. The result has it, too; sums are in float32, or as `accumulators` says.
            right: The same.

        Raises:
            InvalidArgument: For another equation, for one with a diagonal or a label in one operand alone if there are
                `accumulators`, and with delayed scaling, which needs a layer to keep its scales.
        """
        if isinstance(self.scaling, DelayedAmax):
            raise InvalidArgument('einsum: expected scaling="current". Delayed scaling keeps its scales in a layer.')
        left, right = tf.convert_to_tensor(left), tf.convert_to_tensor(right)
        for operand in (left, right):
            if not operand.dtype.is_floating:
                raise InvalidArgument(
                    f"einsum: an operand of dtype {operand.dtype.name}: expected floating-point numbers."
                )
        return einsum(product_of(None, self.tensors, None, self._accumulator, "einsum"), equation, left, right)

    @property
    def _accumulator(self) -> Accumulator | None:
        """How products sum, or None for float32."""
        if self.accumulators is None or self.chunk is None:
            return None
        return Accumulator(self.accumulators, self.chunk)

    @property
    def tensors(self) -> tuple[TensorFormat, TensorFormat, TensorFormat]:
        """How activations, weights and gradients are rounded."""
        formats = (self.format, self.format, self.gradients)
        one, two, three = (
            TensorFormat(format, name in self.stochastic, self.seed, role)
            for role, (name, format) in enumerate(zip(_TENSORS, formats, strict=True))
        )
        return one, two, three


def emulated(
    format: str,
    *,
    gradients: str | None = None,
    scaling: str | DelayedAmax | None = None,
    stochastic: Collection[str] = (),
    seed: int = 0,
    accumulators: str | None = None,
    chunk: int | None = None,
) -> Emulated:
    """Training as in a narrower format: weights and activations are rounded to it before each product of a layer.

    The gradient of a product is rounded before the two products that it enters. What is rounded is float32 again
    afterwards, so it runs on any device, and in no less time than without. Sums are in float32, or are rounded as they
    grow: see `accumulators`. Biases, activation functions, normalization and the update are not rounded: weights stay
    the float32 masters.

    Args:
        format: Of weights and activations.

            - "float8_e4m3fn", "float8_e5m2": each tensor has a scale, and saturates.
            - "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4": blocks of 32 whose
              scale is a power of two.
            - "nvfp4": blocks of 16 of four bits with a scale in E4M3, and a float32 scale for the tensor.
            - "float16", "bfloat16": without a scale.
            - "float32": as they are.

            Blocks lie along what a product sums over: in a convolution along the channels, and in the gradient of its
            kernel along batch and positions.
        gradients: The same of the gradients of products. If not given, "float8_e5m2" for "float8_e4m3fn", and
            otherwise `format`.
        scaling: Where float8 has its scales from: "delayed", by the largest magnitudes of past steps, or "current", by
            that of the tensor itself. A `scaler.DelayedAmax` is delayed scaling with another history, margin or
            with powers of two; its `format` is that of each tensor. If not given, "delayed".
        stochastic: Which are rounded at random: some of "activations", "weights" and "gradients". Others are rounded
            to nearest, ties to even. The numbers are drawn by the values themselves and the seed, so they
            are the same for the same step.
        seed: An integer in [0, 2^31).
        accumulators: "float16" or "bfloat16": what the sum of each of the three products is rounded to, to nearest,
            after each addition. The order is that of the axes that a product sums over, as if flattened, and no
            kernel's, so the bits do not depend on the device, but for sums below 2^-126 in bfloat16, which may be taken
            for 0. Beyond 65504 a sum in float16 is infinite. If not given, sums are in float32 and as the device adds.
        chunk: How many products, each rounded to float32, are summed in float32 before each addition to that sum: at
            least 1. If not given, 16, as many as an instruction of a tensor core takes; 1 rounds after each product.

    Raises:
        InvalidArgument: For a name that is none of these, a `scaling` where neither format is float8, and a `chunk`
            without `accumulators`.

    References:
        Micikevicius et al. 2022, FP8 Formats for Deep Learning (https://arxiv.org/abs/2209.05433). Delayed and current
        scaling: NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py. Rouhani et al. 2023,
        Microscaling Data Formats for Deep Learning (https://arxiv.org/abs/2310.10537); OCP Microscaling Formats (MX)
        Specification 1.0. NVIDIA 2025, Pretraining Large Language Models with NVFP4
        (https://arxiv.org/abs/2509.25149). Chunks, so that sums may have 16 bits: Wang et al. 2018, Training Deep
        Neural Networks with 8-bit Floating Point Numbers (https://arxiv.org/abs/1812.08011). An instruction that adds
        16 products to sums in float16: NVIDIA/cutlass, include/cutlass/arch/mma_sm80.h, m16n8k16.
    """
    if gradients is None:
        gradients = "float8_e5m2" if format == "float8_e4m3fn" else format
    for name, value in (("format", format), ("gradients", gradients)):
        if not isinstance(value, str) or value not in FORMATS:
            raise InvalidArgument(f"emulated({name}={value!r}): expected one of {', '.join(FORMATS)}.")
    named = isinstance(stochastic, (list, tuple, set, frozenset))
    if not named or not all(isinstance(name, str) and name in _TENSORS for name in stochastic):
        raise InvalidArgument(
            f"emulated(stochastic={stochastic!r}): expected some of {', '.join(_TENSORS)}, in a list."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InvalidArgument(f"emulated(seed={seed!r}): expected an integer in [0, 2^31).")
    needs_scales = "float32" in (LAYOUTS[format].scale, LAYOUTS[gradients].scale)
    if scaling is not None and not needs_scales:
        raise InvalidArgument(f"emulated({format!r}, scaling={scaling!r}): only float8 formats have scales of tensors.")
    chosen = _strategy(scaling) if needs_scales else None
    chunk = _chunk(accumulators, chunk)
    return Emulated(format, gradients, chosen, tuple(stochastic), seed, accumulators, chunk)


def _chunk(accumulators: str | None, chunk: int | None) -> int | None:
    """How many products are summed in float32, once the accumulator is checked."""
    if accumulators is None:
        if chunk is not None:
            raise InvalidArgument(
                f"emulated(chunk={chunk!r}): a chunk is added to a narrower accumulator. Pass accumulators="
                f'"{ACCUMULATORS[0]}" as well, or leave chunk= out.'
            )
        return None
    if not isinstance(accumulators, str) or accumulators not in ACCUMULATORS:
        raise InvalidArgument(
            f"emulated(accumulators={accumulators!r}): expected one of {', '.join(ACCUMULATORS)}. Leave it out for "
            "sums in float32."
        )
    if chunk is None:
        return CHUNK
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise InvalidArgument(f"emulated(chunk={chunk!r}): expected a whole number of products, at least 1.")
    return chunk


def _strategy(scaling: str | DelayedAmax | None) -> str | DelayedAmax:
    """Where scales come from, as a strategy or "current"."""
    if scaling is None or (isinstance(scaling, str) and scaling == "delayed"):
        # Transformer Engine's: a history of 1024 steps, its maximum, no margin, no power of two, no bounds.
        return DelayedAmax(power_of_two=False, min_scale=2.0**-126, max_scale=2.0**126)
    if isinstance(scaling, DelayedAmax) or (isinstance(scaling, str) and scaling == "current"):
        return scaling
    raise InvalidArgument(
        f'emulated(scaling={scaling!r}): expected "delayed", "current" or an hs.DelayedAmax of your own.'
    )
