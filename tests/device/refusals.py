"""Operations whose GPU kernels refuse to run once `tf.config.experimental.enable_op_determinism()` was called.

The list is that of the messages in the library of TensorFlow 2.21 ("Determinism is not yet supported ...", "A
deterministic GPU implementation of ... is not currently available"), which come from `OpDeterminismRequired()` in
tensorflow/core/kernels. Sums by segment are no longer among them: those of integers never depend on an order, and those
of floats have kernels that sort. Scatter operations do not refuse, but copy their tensors to the host and back
(scatter_nd_op.cc and scatter_op.cc, `DoScatterNdOnCpu` and `DoScatterOnCpu`; release notes of 2.8).
"""

from collections.abc import Iterator

from audit import Found, operations

_OF_REFERENCES = frozenset(f"Scatter{what}" for what in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update"))
_WITHOUT_A_SEED = frozenset(
    {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal"}
)
REFUSE = _OF_REFERENCES | {
    "AdjustContrast",
    "AdjustContrastv2",
    "Bincount",
    "CropAndResizeGradBoxes",
    "CropAndResizeGradImage",
    "DebugNumericSummaryV2",
    "DenseBincount",
    "Dilation2DBackpropFilter",
    "Dilation2DBackpropInput",
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    "MaxPoolGradWithArgmax",
    "NonDeterministicInts",
    "ResizeNearestNeighborGrad",
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
    "SparseTensorDenseMatMul",
    "Svd",
    "Timestamp",
}
ON_THE_HOST = frozenset(
    {f"ResourceScatter{what}" for what in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update")}
    | {f"ResourceScatterNd{what}" for what in ("Add", "Sub", "Min", "Max", "Update")}
    | {f"TensorScatter{what}" for what in ("Add", "Sub", "Min", "Max", "Update")}
    | {"ScatterNd", "ScatterNdNonAliasingAdd"}
)
_FROZEN = frozenset({"FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"})


def refused(concrete) -> list[Found]:
    """The operations of a concrete function that would not run, but for what XLA compiles."""
    return list(_refused(concrete))


def _refused(concrete) -> Iterator[Found]:
    for op, path in operations(concrete):
        if op.type in REFUSE or (op.type in _FROZEN and not op.get_attr("is_training")):
            yield Found(op.type, "refuses determinism", f"{path}{op.name}")
        elif op.type in ON_THE_HOST:
            yield Found(op.type, "runs on the host", f"{path}{op.name}")
        elif op.type in _WITHOUT_A_SEED and not (op.get_attr("seed") or op.get_attr("seed2")):
            yield Found(op.type, "has no seed", f"{path}{op.name}")
