"""What each operation does: one table. One that is not in it makes what is unknown of what depends on a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
_Rule = tuple | Callable[[Any, Sequence[Unit]], Unit]


class Operation(NamedTuple):
    """What one type of operations does: a row of a table in which each column is a question.

    Attributes:
        unit: The exponent of each input of a product, where those beyond have to be plain; or a function of the
            operation and the units of its inputs. None if nothing is known.
        moves: Whether it only stores, reads or moves values, and so rounds none.
        is_view: Whether its output shares the buffer of an input.
    """

    unit: _Rule | None = None
    moves: bool = False
    is_view: bool = False


def operation_of_type(name: str) -> Operation:
    """What a type of operations of TensorFlow does, such as "MatMul"."""
    return _OPERATIONS.get(name, _OTHER)


def _sum(op: Any, units: Sequence[Unit]) -> Unit:
    # A backward pass adds up the derivatives of different paths, which have little reason to cancel.
    return total(units, Why.SUM, op.name, may_cancel=op.type != "AddN")


def _difference(op: Any, units: Sequence[Unit]) -> Unit:
    return ZERO if _same(op.inputs[0]) is _same(op.inputs[1]) else _sum(op, units)


def _sum_at_places(op: Any, units: Sequence[Unit]) -> Unit:
    return _sum(op, [unit for unit, one in zip(units, op.inputs, strict=True) if not one.dtype.is_integer])


def _chosen(op: Any, units: Sequence[Unit]) -> Unit:
    return units[1] if _replaces_zero(op) else choice(units[0], units[1:], op.name)


def _cast(op: Any, units: Sequence[Unit]) -> Unit:
    if op.outputs[0].dtype.is_bool:
        return sign(units[0])
    rounds = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
    return _of_unknown(units) if rounds else units[0]


def _power(op: Any, units: Sequence[Unit]) -> Unit:
    exponent = _number(op.inputs[1])
    return product([(units[0], exponent)]) if exponent is not None else _of_unknown(units)


def _listed(op: Any, units: Sequence[Unit]) -> Unit:
    pairs = zip(units, op.inputs, strict=True)
    return beside([unit for unit, one in pairs if not one.dtype.is_integer or len(units) == 1])


_VIEW, _MOVE = {"moves": True, "is_view": True}, {"moves": True}


def _rows(names: str, unit: _Rule | None, **others: bool) -> dict[str, Operation]:
    return dict.fromkeys(names.split(), Operation(unit, **others))


_OTHER = Operation()
_OPERATIONS = {
    **_rows("Identity StopGradient PreventGradient EnsureShape Reshape Squeeze ExpandDims", (1,), **_VIEW),
    **_rows(
        "Transpose Slice StridedSlice Reverse ReverseV2 Tile BroadcastTo Gather GatherV2 GatherNd Unpack SplitV "
        "TensorListStack TensorListFromTensor TensorListGetItem",
        (1,),
        **_MOVE,
    ),
    **_rows(
        "CheckNumerics CheckNumericsV2 Snapshot Pad PadV2 MirrorPad Sum Mean Max Min Cumsum SegmentSum "
        "UnsortedSegmentSum Neg Abs Relu LeakyRelu Conj Real CollectiveReduce CollectiveReduceV2 CollectiveReduceV3 "
        "NcclAllReduce AvgPool MaxPool BiasAddGrad Diag DiagPart MatrixDiagPartV3 MatrixDiagV3 MatrixBandPart "
        "TensorListGather TensorListConcatV2 TensorListResize OptionalFromValue OptionalGetValue SpaceToBatchND "
        "BatchToSpaceND DepthToSpace SpaceToDepth ResizeBilinear ResizeNearestNeighbor ResizeBilinearGrad "
        "TensorListElementShape EuclideanNorm",
        (1,),
    ),
    **_rows("Mul MulNoNan MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D DepthwiseConv2dNative", (1, 1)),
    **_rows("Split Fill", (0, 1), **_MOVE),
    **_rows("AvgPoolGrad ScatterNd", (0, 1)),
    **_rows("Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter Conv3DBackpropFilterV2", (1, 0, 1)),
    **_rows("Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput Conv3DBackpropInputV2", (0, 1, 1)),
    **_rows("RealDiv Div DivNoNan Xdivy", (1, -1)),
    **_rows("Reciprocal Inv MatrixInverse", (-1,)),
    **_rows("MatrixSolve MatrixTriangularSolve", (-1, 1)),
    **_rows("SparseTensorDenseMatMul", (0, 1, 0, 1)),
    **_rows("ReciprocalGrad InvGrad", (2, 1)),
    **_rows("Square L2Loss", (2,)),
    **_rows("Sqrt", (0.5,)),
    **_rows("Rsqrt", (-0.5,)),
    **_rows("SqrtGrad", (-1, 1)),
    **_rows("RsqrtGrad", (3, 1)),
    **_rows("StridedSliceGrad", (0, 0, 0, 0, 1), **_MOVE),
    **_rows("ReluGrad LeakyReluGrad", (1, _S)),
    **_rows("SoftplusGrad SoftsignGrad EluGrad SeluGrad Relu6Grad", (1, _C)),
    **_rows("TanhGrad SigmoidGrad", (_C, 1)),
    **_rows("MaxPoolGrad", (_S, _S, 1)),
    **_rows("FusedBatchNormGradV3", (1, _C, 1, _C, _C, _C)),
    **_rows("Sign", (_S,)),
    **_rows(
        "Exp Expm1 Log1p Tanh Sigmoid Softplus Softsign Elu Selu Relu6 Sin Cos Erf Sinh Cosh Atan Softmax LogSoftmax",
        (_C,),
    ),
    **_rows("AddV2 Add AddN BiasAdd", _sum),
    **_rows("Sub", _difference),
    **_rows("TensorScatterAdd TensorScatterSub", _sum_at_places),
    **_rows("Maximum Minimum", lambda op, units: total(units, Why.LIMIT, op.name)),
    **_rows("Select SelectV2", _chosen),
    **_rows(
        "Less LessEqual Greater GreaterEqual Equal NotEqual LogicalAnd LogicalOr LogicalNot All Any",
        lambda op, units: sign(total(units, Why.SIZE, op.name)),
    ),
    **_rows("Cast", _cast),
    **_rows("Einsum", lambda op, units: product((unit, 1) for unit in units)),
    **_rows("SquaredDifference", lambda op, units: product([(total(units, Why.SUM, op.name), 2)])),
    **_rows("Pow", _power),
    **_rows("Pack ConcatV2 TensorListSetItem TensorListPushBack", _listed, **_MOVE),
    **_rows("Complex TensorScatterUpdate ParallelConcat", _listed),
    **_rows("ZerosLike TensorListReserve", lambda op, units: ZERO, **_MOVE),
    **_rows("EmptyTensorList OptionalNone", lambda op, units: ZERO),
    **_rows("OnesLike", lambda op, units: GUARD, **_MOVE),  # A choice between a number and 1 avoids a division by 0.
    **_rows("Shape", lambda op, units: ONE, **_MOVE),
    **_rows("IsFinite IsInf IsNan ShapeN Size Rank TensorListLength BroadcastGradientArgs", lambda op, units: ONE),
    **_rows("IdentityN", None, **_VIEW),  # Of what has several outputs `units_of_results` makes the units.
    **_rows(
        "TensorListPopBack Assert Assign AssignAddVariableOp AssignSubVariableOp AssignVariableOp Const NoOp "
        "Placeholder ReadVariableOp ResourceGather VarHandleOp",
        None,
        **_MOVE,
    ),
}
_OF_NO_SCALE = frozenset([Note.UNSCALED, Note.CANCELLED, Note.MODEL, Note.DOUBTFUL])
"""Notes of a factor that is not made of scales and constants alone."""
_LARGEST_READ = 4096
"""Elements of a constant that is looked at."""
_SMALL, _HUGE, _SMALLEST_INVERSE = 1e-4, 1e30, 2.0**-20
_LARGEST_OF_FORMATS = (448.0, 57344.0, 65504.0)
"""Of float8 (E4M3 and E5M2) and float16: a limit at which a format saturates is right at any scale."""


def units_of_results(op: Any, units: Sequence[Unit], products: dict[tuple, Unit]) -> list[Unit]:
    """The units of what an operation makes of inputs of these units; `products` keeps those of factors."""
    kind = op.type
    rule = _OPERATIONS.get(kind, _OTHER).unit
    if kind == "IdentityN":
        return list(units)
    if kind == "TensorListPopBack":
        return [units[0], units[0]]
    if kind == "TopKV2":
        return [units[0], ONE]  # A factor changes no order.
    if isinstance(rule, tuple):
        found = _of_product(kind, rule, units, products)
    elif rule is not None:
        found = rule(op, units)
    else:
        found = _of_unknown(units)
        found = UNKNOWN if is_plain(found) and _may_give_a_scale(op, kind) else found
    return [found] * len(op.outputs)


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
