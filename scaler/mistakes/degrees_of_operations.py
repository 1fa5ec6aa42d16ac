"""The degree of what an operation makes of tensors of known degrees. What is not in these tables is not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from scaler.backend.graphs import BRANCHES, is_eager
from scaler.mistakes import degrees
from scaler.mistakes.degrees import Degree, Special

_FIRST = (
    *("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics", "CheckNumericsV2", "EnsureShape"),
    *("Reshape", "Squeeze", "ExpandDims", "Transpose", "Unpack", "Slice", "StridedSlice", "Reverse", "ReverseV2"),
    *("Pad", "Tile", "BroadcastTo", "Gather", "GatherV2", "GatherNd", "SplitV", "Sum", "Mean", "Max", "Min", "Cumsum"),
    *("SegmentSum", "UnsortedSegmentSum", "Neg", "Abs", "Relu", "LeakyRelu", "Conj", "Real", "CollectiveReduce"),
    *("CollectiveReduceV2", "CollectiveReduceV3", "NcclAllReduce", "Placeholder", "PartitionedCall"),
    "StatefulPartitionedCall",
)
_PASSED_ON = {**dict.fromkeys(_FIRST, 0), "Split": 1, "Fill": 1, "StridedSliceGrad": 4}
"""Operations whose result has the degree of one input, with its place."""
_SUMS = ("AddV2", "Add", "AddN", "Sub", "Maximum", "Minimum")
_LISTS = ("Pack", "ConcatV2")
_PRODUCTS = ("Mul", "MulNoNan", "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
_POWERS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(_PRODUCTS, (1.0, 1.0)),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan", "Xdivy"), (1.0, -1.0)),
    **dict.fromkeys(("Reciprocal", "Inv"), (-1.0,)),
    **dict.fromkeys(("ReciprocalGrad", "InvGrad"), (2.0, 1.0)),
    **dict.fromkeys(("Square", "L2Loss"), (2.0,)),
    **{"Sqrt": (0.5,), "Rsqrt": (-0.5,), "SqrtGrad": (-1.0, 1.0), "RsqrtGrad": (3.0, 1.0)},
}
"""Products of powers of the inputs, with the exponents."""
_COMPARISONS = ("Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual")
_LOGICAL = ("LogicalAnd", "LogicalOr", "LogicalNot")
_OF_NO_SCALE = ("IsFinite", "IsInf", "IsNan", "OnesLike", "Shape", "Size", "Rank")
_CURVES = (
    *("Exp", "Expm1", "Log1p", "Tanh", "Sigmoid", "Softplus", "Softsign", "Elu", "Selu", "Relu6", "Sin", "Cos", "Erf"),
    *("Sinh", "Cosh", "Atan"),
)
_SLOPES: dict[str, tuple[int, Callable[[Degree], Degree]]] = {
    **dict.fromkeys(("ReluGrad", "LeakyReluGrad"), (1, degrees.of_sign)),
    **dict.fromkeys(("SoftplusGrad", "SoftsignGrad", "EluGrad", "SeluGrad", "Relu6Grad"), (1, degrees.of_curve)),
    **dict.fromkeys(("TanhGrad", "SigmoidGrad"), (0, degrees.of_curve)),
}
"""Derivatives of functions of one input: the place of what the slope depends on, and how."""


def degree_of_result(op: tf.Operation, inputs: Sequence[Degree]) -> Degree:
    """The degree of what an operation makes of inputs of these degrees; of branches, the condition is the first."""
    kind = op.type
    if kind in BRANCHES or kind in ("Select", "SelectV2"):
        return degrees.of_choice(inputs[0], inputs[1:])
    if kind in _PASSED_ON:
        place = _PASSED_ON[kind]
        others = [*inputs[:place], *inputs[place + 1 :]]
        return inputs[place] if all(map(degrees.is_without_scale, others)) else None
    if kind in _SUMS:
        # A backward pass adds up the derivatives of different paths, which have little reason to cancel.
        return degrees.of_sum(inputs, may_cancel=kind != "AddN")
    if kind in _LISTS:
        return degrees.of_list(inputs[: -1 if kind == "ConcatV2" else None])
    if kind in _POWERS and len(inputs) == len(_POWERS[kind]):
        return degrees.of_product(zip(inputs, _POWERS[kind], strict=True))
    return _of_function(op, kind, inputs)


def _of_function(op: tf.Operation, kind: str, inputs: Sequence[Degree]) -> Degree:
    if kind == "Cast":
        rounds = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
        return degrees.of_unknown(inputs) if rounds else inputs[0]
    if kind == "Pow":
        exponent = _number(op.inputs[1])
        return degrees.of_unknown(inputs) if exponent is None else degrees.of_product([(inputs[0], exponent)])
    if kind == "SquaredDifference":
        return degrees.of_product([(degrees.of_sum(inputs), 2.0)])
    if kind == "Sign":
        return degrees.of_sign(inputs[0])
    if kind in _COMPARISONS:
        return degrees.of_comparison(inputs)
    if kind in _LOGICAL:
        return None if None in inputs else next(filter(degrees.depends, inputs), 0.0)
    if kind == "ZerosLike":
        return Special.ZERO
    if kind in _OF_NO_SCALE:
        return 0.0
    if kind in _CURVES:
        return degrees.of_curve(inputs[0])
    if kind in _SLOPES:
        place, of_slope = _SLOPES[kind]
        return degrees.of_product([(of_slope(inputs[place]), 1.0), (inputs[1 - place], 1.0)])
    return degrees.of_unknown(inputs)


def _number(tensor: tf.Tensor) -> float | None:
    """The value of a constant, or of the difference of two, as the derivative of a power has it."""
    if not is_eager(tensor) and tensor.op.type == "Sub":
        first, second = map(_number, tensor.op.inputs)
        return None if first is None or second is None else first - second
    value = tf.get_static_value(tensor)
    return float(value) if value is not None and value.size == 1 else None
