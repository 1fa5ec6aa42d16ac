"""What each operation does with units. One that is not here makes what is unknown of what depends on a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaler.misuse.units import (
    GUARD,
    ONE,
    UNKNOWN,
    ZERO,
    Mixed,
    Note,
    Power,
    Unit,
    Unknown,
    Why,
    beside,
    choice,
    curve,
    is_plain,
    product,
    sign,
    total,
    unknown,
)

_S, _C = "sign", "curve"
"""Inputs of which only the sign counts, and inputs that no factor passes through."""


def _alike(rule: tuple, names: str) -> dict[str, tuple]:
    return dict.fromkeys(names.split(), rule)


_PRODUCTS: dict[str, tuple] = {
    **_alike(
        (1,),
        "Identity StopGradient PreventGradient CheckNumerics CheckNumericsV2 EnsureShape Snapshot Reshape Squeeze "
        "ExpandDims Transpose Slice StridedSlice Reverse ReverseV2 Pad PadV2 MirrorPad Tile BroadcastTo Gather "
        "GatherV2 GatherNd Unpack SplitV Sum Mean Max Min Cumsum SegmentSum UnsortedSegmentSum Neg Abs Relu LeakyRelu "
        "Conj Real CollectiveReduce CollectiveReduceV2 CollectiveReduceV3 NcclAllReduce AvgPool MaxPool BiasAddGrad "
        "Diag DiagPart MatrixDiagPartV3 MatrixDiagV3 MatrixBandPart TensorListStack TensorListFromTensor "
        "TensorListGetItem TensorListGather TensorListConcatV2 TensorListResize OptionalFromValue OptionalGetValue "
        "SpaceToBatchND BatchToSpaceND DepthToSpace SpaceToDepth ResizeBilinear ResizeNearestNeighbor "
        "ResizeBilinearGrad TensorListElementShape",
    ),
    **_alike((1, 1), "Mul MulNoNan MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D DepthwiseConv2dNative"),
    **_alike((0, 1), "Split Fill AvgPoolGrad ScatterNd"),
    **_alike((1, 0, 1), "Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter Conv3DBackpropFilterV2"),
    **_alike((0, 1, 1), "Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput Conv3DBackpropInputV2"),
    **_alike((1, -1), "RealDiv Div DivNoNan Xdivy"),
    **_alike((-1,), "Reciprocal Inv MatrixInverse"),
    **_alike((-1, 1), "MatrixSolve MatrixTriangularSolve"),
    **_alike((0, 1, 0, 1), "SparseTensorDenseMatMul"),
    **_alike((2, 1), "ReciprocalGrad InvGrad"),
    **_alike((2,), "Square L2Loss"),
    **_alike((1, _S), "ReluGrad LeakyReluGrad"),
    **_alike((1, _C), "SoftplusGrad SoftsignGrad EluGrad SeluGrad Relu6Grad"),
    **_alike((_C, 1), "TanhGrad SigmoidGrad"),
    **{"Sqrt": (0.5,), "Rsqrt": (-0.5,), "SqrtGrad": (-1, 1), "RsqrtGrad": (3, 1), "StridedSliceGrad": (0, 0, 0, 0, 1)},
    **{"MaxPoolGrad": (_S, _S, 1), "FusedBatchNormGradV3": (1, _C, 1, _C, _C, _C), "Sign": (_S,)},
    **_alike(
        (_C,),
        "Exp Expm1 Log1p Tanh Sigmoid Softplus Softsign Elu Selu Relu6 Sin Cos Erf Sinh Cosh Atan Softmax LogSoftmax",
    ),
}
"""The exponent of each input of a product. Inputs beyond those named have to be plain."""
_SUMS = {
    **dict.fromkeys(("AddV2", "Add", "AddN", "Sub", "BiasAdd", "TensorScatterAdd", "TensorScatterSub"), Why.SUM),
    **dict.fromkeys(("Maximum", "Minimum"), Why.LIMIT),
}
_LISTS = frozenset(
    ("Pack", "ConcatV2", "Complex", "TensorListSetItem", "TensorListPushBack", "TensorScatterUpdate", "ParallelConcat")
)
_COMPARISONS = frozenset(
    (
        *("Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"),
        *("LogicalAnd", "LogicalOr", "LogicalNot", "All", "Any"),
    )
)
_PLAIN = frozenset(
    ("IsFinite", "IsInf", "IsNan", "Shape", "ShapeN", "Size", "Rank", "TensorListLength", "BroadcastGradientArgs")
)
_ZEROS = frozenset(("ZerosLike", "TensorListReserve", "EmptyTensorList", "OptionalNone"))
_OF_NO_SCALE = frozenset([Note.UNSCALED, Note.CANCELLED, Note.MODEL, Note.DOUBTFUL])
"""Notes of a factor that is not made of scales and constants alone."""
_LARGEST_READ = 4096
"""Elements of a constant that is looked at."""
_SMALL, _HUGE, _SMALLEST_INVERSE = 1e-4, 1e30, 2.0**-20
_LARGEST_OF_FORMATS = (448.0, 57344.0, 65504.0)
"""Of float8 (E4M3 and E5M2) and float16: a limit at which a format saturates is right at any scale."""


def units_of_results(op: Any, units: Sequence[Unit], products: dict[tuple, Unit]) -> list[Unit]:
    """The units of what an operation makes of inputs of these units; `products` keeps those of factors."""
    kind, rule = op.type, _PRODUCTS.get(op.type)
    if rule is not None:
        return [_of_product(kind, rule, units, products)] * len(op.outputs)
    if kind == "IdentityN":
        return list(units)
    if kind == "TensorListPopBack":
        return [units[0], units[0]]
    if kind == "TopKV2":
        return [units[0], ONE]  # A factor changes no order.
    return [_unit_of_result(op, kind, units)] * len(op.outputs)


def _of_product(kind: str, rule: tuple, units: Sequence[Unit], products: dict[tuple, Unit]) -> Unit:
    for unit in units[len(rule) :]:
        if isinstance(unit, Unknown | Mixed):
            return unknown(units)
    if rule == (1,):
        return units[0]
    key = (kind, *units)
    if key not in products:
        divisor = units[1] if kind == "RealDiv" else None
        if isinstance(divisor, Power) and not divisor.powers:
            # A constant that divides is the size of a batch.
            units = [units[0], Power(notes=divisor.notes - {Note.NUMBER})]
        factors: list[tuple[Unit, float]] = []
        for unit, way in zip(units, rule, strict=False):
            if way in (_S, _C):
                factors.append((sign(unit) if way == _S else curve(unit), 1.0))
            elif way:
                factors.append((unit, way))
        found = product(factors)
        # A divisor that is made of scales and constants takes the scale out.
        unscales = isinstance(divisor, Power) and divisor.powers and not divisor.notes & _OF_NO_SCALE
        if unscales and isinstance(found, Power) and Note.CANCELLED in found.notes:
            found = Power(found.powers, found.notes | {Note.UNSCALED})
        products[key] = found
    return products[key]


def _unit_of_result(op: Any, kind: str, units: Sequence[Unit]) -> Unit:
    if kind == "Sub" and _same(op.inputs[0]) is _same(op.inputs[1]):
        return ZERO
    if kind in _SUMS:
        parts = units
        if kind[0] == "T":
            parts = [unit for unit, one in zip(units, op.inputs, strict=True) if not one.dtype.is_integer]
        # A backward pass adds up the derivatives of different paths, which have little reason to cancel.
        return total(parts, _SUMS[kind], op.name, may_cancel=kind != "AddN")
    if kind in ("Select", "SelectV2"):
        return units[1] if _replaces_zero(op) else choice(units[0], units[1:], op.name)
    if kind in _COMPARISONS:
        return sign(total(units, Why.SIZE, op.name))
    if kind == "Cast":
        if op.outputs[0].dtype.is_bool:
            return sign(units[0])
        rounds = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
        return _of_unknown(units) if rounds else units[0]
    if kind == "Einsum":
        return product((unit, 1) for unit in units)
    if kind == "SquaredDifference":
        return product([(total(units, Why.SUM, op.name), 2)])
    if kind == "Pow":
        exponent = _number(op.inputs[1])
        return product([(units[0], exponent)]) if exponent is not None else _of_unknown(units)
    if kind in _LISTS:
        pairs = zip(units, op.inputs, strict=True)
        return beside([unit for unit, one in pairs if not one.dtype.is_integer or len(units) == 1])
    if kind in _ZEROS:
        return ZERO
    if kind == "OnesLike":
        return GUARD  # A choice between a number and one avoids a division by zero.
    if kind in _PLAIN:
        return ONE
    found = _of_unknown(units)
    return UNKNOWN if is_plain(found) and _may_give_a_scale(op, kind) else found


def _same(tensor: Any) -> Any:
    """The tensor that a tensor is a copy of."""
    while tensor.op.type in ("StopGradient", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor


def _replaces_zero(op: Any) -> bool:
    """Whether an operation chooses by whether one of its inputs is more than zero: then the first choice counts.

    The other one is chosen where the input is zero, or is the input itself where that is zero.
    """
    condition, *choices = op.inputs
    if condition.op.type not in ("Greater", "NotEqual"):
        return False
    compared, with_what = condition.op.inputs
    value = tf.get_static_value(with_what)
    return value is not None and not np.any(value) and any(compared is one for one in choices)


def _may_give_a_scale(op: Any, kind: str) -> bool:
    """Whether an operation gets a number from elsewhere, which may be a scale."""
    if any(one.dtype.is_floating for one in op.inputs) or "Random" in kind or "TruncatedNormal" in kind:
        return False
    return "PyFunc" in kind or any(one.dtype.is_floating and one.shape.rank in (0, None) for one in op.outputs)


def _of_unknown(units: Sequence[Unit]) -> Unit:
    notes: frozenset = frozenset()
    for unit in units:
        if not is_plain(unit):
            return unknown(units)
        if isinstance(unit, Power):
            notes |= unit.notes
    return Power(notes=notes)


def unit_of_constant(tensor: Any) -> Unit:
    """The unit of a constant of a graph, or of an eager tensor that it captured."""
    if not tensor.dtype.is_floating:
        return ONE
    value = tf.get_static_value(tensor)
    if value is None:
        return UNKNOWN
    if not np.any(value):
        return ZERO
    if value.size > _LARGEST_READ:
        return ONE
    sizes = np.abs(np.asarray(value, np.float64))
    if (
        sizes.size == 1
        and sizes.item() < _HUGE
        and sizes.item() not in _LARGEST_OF_FORMATS
        and _may_be_scale(sizes.item())
    ):
        return Power(notes=frozenset([Note.NUMBER]))
    guards = (sizes <= _SMALL) | ~(sizes < _HUGE) | np.isin(sizes, _LARGEST_OF_FORMATS)
    return GUARD if guards.all() else ONE


def _may_be_scale(number: float) -> bool:
    """Whether a user may mean a number as a loss scale: at least 100, or a power of two from 8 on, or its inverse."""
    if number >= 100.0:
        return True
    # A smaller power of two is the spacing of float32's numbers.
    return number >= _SMALLEST_INVERSE and abs(np.log2(number)) >= 3.0 and not np.log2(number) % 1.0


def _number(tensor: Any) -> float | None:
    """The value of a constant, or of the difference of two, as the derivative of a power has it."""
    if getattr(tensor, "op", None) is not None and tensor.op.type == "Sub":
        first, second = map(_number, tensor.op.inputs)
        return None if first is None or second is None else first - second
    value = tf.get_static_value(tensor)
    return float(value) if value is not None and value.size == 1 else None
