"""What is wrong with a loss: it, or probabilities behind it, are float16; no division by replicas; 16 bits and XLA."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import in_xla, is_eager, upstream
from scaler.backend.layers import is_softmax_or_sigmoid
from scaler.backend.versions import is_slow_in_float16

_LAYERS = ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative")
_SHAPES = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Gather", "GatherV2", "GatherNd", "StridedSlice")
_PASS_ON = (*_SHAPES, "Maximum", "Minimum", "ClipByValue", "AddV2", "Sub", "RealDiv", "Neg")
"""Operations after which a probability is still nearly one: an epsilon, a normalisation, clipping or indexing."""
_PROBABILITIES = ("Softmax", "LogSoftmax", "Sigmoid")


def float16_loss(loss: Any) -> str | None:
    """Returns a warning if a loss is float16, else None."""
    if getattr(loss, "dtype", None) != tf.float16:
        return None
    return (
        "the loss is float16: it is rounded to three digits, is infinite above 65504, and limits the loss scale to "
        "2^15. Compute it in float32: give the model's last layer dtype='float32', or cast its output."
    )


def float16_probabilities_behind(loss: tf.Tensor) -> str | None:
    """Returns a warning if a loss in a graph takes the logarithm of a float16 softmax or sigmoid, else None.

    The search ends at the last layer with weights. Before it, attention has softmaxes and gates have sigmoids.
    """
    if tf.executing_eagerly():
        return None
    logarithms = []
    for tensor in upstream([loss], _LAYERS.__contains__):
        if not is_eager(tensor) and tensor.op.type in ("Log", "Log1p"):
            logarithms.append(tensor.op.inputs[0])
    return float16_probabilities(list(upstream(logarithms, lambda kind: kind not in _PASS_ON))) if logarithms else None


def float16_probabilities(prediction: Any) -> str | None:
    """Returns a warning if a float16 softmax or sigmoid is among a model's predictions, else None."""
    if not any(_is_probability(tensor) for tensor in tf.nest.flatten(prediction)):
        return None
    return (
        "the model's last layer is a softmax or sigmoid in float16, where probabilities below 6e-8 become 0 and their "
        "logarithm infinite: give that layer dtype='float32'."
    )


def resized_in_xla(loss: tf.Tensor) -> str | None:
    """Returns a warning if XLA compiles the gradient of a bilinear resize in 16 bits behind a layer, else None.

    It makes a float32 tensor of it, which convolutions take, and activations and poolings do not: XLA then ends in
    "Seen floating point types of different precisions", with no word of the resize.
    """
    if not in_xla(if_unknown=False):
        return None
    resizes = [op for op in loss.graph.get_operations() if op.type == "ResizeBilinear" and op.inputs[0].dtype.size == 2]
    names = [op.name.rsplit("/", 2)[0] for op in resizes]  # Behind the layer's are those of Keras's function.
    if not names:
        return None
    return (
        f"XLA may refuse to compile the gradients of the bilinear resizes {names} in 16 bits, which it makes float32: "
        "give these layers dtype='float32', or pass jit_compile=False."
    )


def is_computed_slowly(loss: tf.Tensor) -> bool:
    """Whether a loss in a graph is computed by products in float16 that this processor is slow at: see `processor`."""
    if not is_slow_in_float16() or tf.executing_eagerly() or in_xla(if_unknown=False):
        return False
    return any(op.type in _LAYERS and op.outputs[0].dtype == tf.float16 for op in loss.graph.get_operations())


def _is_probability(tensor: Any) -> bool:
    if not tf.is_tensor(tensor) or tensor.dtype != tf.float16:
        return False
    if is_softmax_or_sigmoid(tensor):
        return True
    if tf.executing_eagerly() or is_eager(tensor):
        return False
    op = tensor.op
    while op.type in ("Identity", "Reshape"):
        op = op.inputs[0].op
    return op.type in _PROBABILITIES


_PASS = ("Identity", "Cast", "EnsureShape", "Reshape", "AddV2", "AddN", "Sub", "Neg", "Pack")
_EACH = (
    *("Square", "SquaredDifference", "Pow", "Abs", "Log", "Log1p", "Relu", "Softplus", "Maximum"),
    *("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
)
"""Operations that make a number of each example, and divide nothing."""


def undivided_mean(loss: tf.Tensor) -> str | None:
    """The warning if a loss is a mean over one replica's examples where the gradients of all are added; else None.

    Args:
        loss: As it is scaled.
    """
    if not _is_only(loss, "Mean"):
        return None
    return (
        f"scale_loss(loss): the gradients of {replicas.replica_count()} replicas are added, and nothing divides this "
        "mean by their number: the step is that many times as large as on one device. Divide it by "
        "tf.distribute.get_strategy().num_replicas_in_sync, or use a loss of keras.losses, which does."
    )


def divided_sum(loss: tf.Tensor) -> str | None:
    """The warning if a loss is a sum over one replica's examples where the step takes the mean of all; else None.

    Args:
        loss: As the loss function returned it.
    """
    if not _is_only(loss, "Sum"):
        return None
    return (
        f"the loss is a sum over examples. On {replicas.replica_count()} replicas a step takes it for the mean over "
        "those of one, and divides it by their number: it is that much smaller than on one device. Take the mean, or "
        "pass a Keras loss with reduction='sum'."
    )


def _is_only(loss: tf.Tensor, reduction: str) -> bool:
    """Whether a loss on several replicas is made of such reductions over examples alone, as far as a graph shows it.

    A product with any number, and a quotient, may be a division by the number of replicas: then it is not.
    """
    if replicas.replica_count() == 1 or is_eager(loss):
        return False
    waiting = [(loss, False)]
    while waiting:
        tensor, behind = waiting.pop()
        op = tensor.op
        if op.type in _PASS or (op.type == reduction and not behind):
            inputs = op.inputs if op.type in ("AddV2", "AddN", "Sub", "Pack") else op.inputs[:1]
            waiting += [(one, behind or (op.type == reduction and one.shape.rank != 0)) for one in inputs]
        elif not behind or op.type not in _EACH or op.inputs[0].op.type == "ReadVariableOp":
            return False
    return True
