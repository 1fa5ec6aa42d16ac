"""Traces made by hand, for the tests of replays."""

import numpy as np
import pyarrow as pa

import loops
from loops.record.trace.tensors import Tensor
from loops.record.trace.visit_columns import critical_scales

GRADIENT, WEIGHT, ACTIVATION = "activation_gradients/a", "weight_gradients/a/kernel", "activations/a"
TENSORS = [Tensor(GRADIENT, "float16", True), Tensor(WEIGHT, "float16", True), Tensor(ACTIVATION, "float16", False)]


def tables(gradient, scale=2.0**4, weight=None, counts=None, lacks=(), **columns):
    """The tables of a trace: of each step the largest gradient, as it would be unscaled, rounded as float16 has it.

    Args:
        gradient: [steps], of an activation.
        scale: The recorded loss scale, or one for each step.
        weight: [steps], of a weight; a quarter of the other, if not given.
        counts: Dicts from the bins of WEIGHT to counts, by the numbers of their steps.
        lacks: As in `TraceTables`.
        columns: Of the steps, in the place of what follows from the gradients.
    """
    gradient = np.asarray(gradient, np.float64)
    steps, scale = len(gradient), np.broadcast_to(np.float64(scale), [len(gradient)])
    weight = gradient / 4 if weight is None else np.asarray(weight, np.float64)
    with np.errstate(over="ignore"):
        amax = np.stack([gradient * scale, weight * scale, np.ones(steps)], 1).astype(np.float16).astype(np.float32)
    critical = critical_scales(amax, scale, TENSORS)
    applied = np.isfinite(amax).all(axis=1)
    values = {
        "step": np.arange(1, steps + 1),
        "loss_scale": scale,
        "critical_low": critical.low,
        "critical_high": critical.high,
        "attempted": np.ones(steps, bool),
        "applied": applied,
        "cause": [None if one else "OVERFLOW" for one in applied],
        **{f"amax/{tensor.name}": amax[:, place] for place, tensor in enumerate(TENSORS)},
        **columns,
    }
    entries = [(step, place, count) for step, bins in (counts or {}).items() for place, count in bins.items()]
    names = pa.array([tensor.name for tensor in TENSORS])
    histograms = {
        "step": pa.array([entry[0] for entry in entries], pa.int64()),
        "tensor": pa.DictionaryArray.from_arrays(pa.array([1] * len(entries), pa.int32()), names),
        "bin": pa.array([entry[1] for entry in entries], pa.int16()),
        "count": pa.array([entry[2] for entry in entries], pa.int64()),
    }
    described = [{"name": one.name, "format": one.format, "carries_scale": one.carries_scale} for one in TENSORS]
    arrays = {name: pa.array(value) for name, value in values.items()}
    arrays["cause"] = arrays["cause"].cast(pa.string())
    return loops.observe.TraceTables(pa.table(arrays), pa.table(histograms), pa.Table.from_pylist(described), lacks)
