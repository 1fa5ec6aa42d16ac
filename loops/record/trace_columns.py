"""Converts a trace's tables to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

import scaler
from loops.record.columns import DECISIONS, NUMBERS, cause_name
from loops.record.log import Log
from loops.record.run import Gauges, Measured
from loops.record.trace import TraceTables


def columns_of(steps: Any) -> Log:
    """The steps of a trace, as columns like those of a log. Columns that are all null are left out.

    Args:
        steps: A `pyarrow.Table` with the columns of `TraceTables.steps`.
    """
    columns = {
        name: _floats(steps[name])
        for name in (*NUMBERS, *DECISIONS)
        if name in steps.column_names and steps[name].null_count < len(steps)
    }
    cause = np.array([cause_name(one) for one in steps["cause"].to_pylist()], np.str_)
    return Log(steps["step"].to_numpy().astype(np.int64), columns, cause, 0)


def measured_in(tables: TraceTables) -> Measured | None:
    """What probes measured, or None if there were none."""
    names = tables.tensors["name"].to_pylist()
    if not names or not len(tables.steps):
        return None
    columns = [tables.steps[f"amax/{name}"] for name in names]
    missing = np.stack([np.asarray(column.combine_chunks().is_null()) for column in columns], axis=1)
    # A step without probes is null in every tensor; one that some part did not take, in those of the part.
    known = ~missing.all(axis=1)
    amax = np.where(missing, 0.0, np.stack([_floats(column) for column in columns], axis=1)).astype(np.float32)
    entries = tables.histograms
    tensor = entries["tensor"].combine_chunks()
    return Measured(
        step=tables.steps["step"].to_numpy().astype(np.int64)[known],
        names=tuple(names),
        formats=tuple(tables.tensors["format"].to_pylist()),
        carries_scale=np.array(tables.tensors["carries_scale"].to_pylist(), bool),
        amax=amax[known],
        missing=missing[known],
        counted=entries["step"].to_numpy().astype(np.int64),
        tensor=np.asarray(tensor.indices).astype(np.int64) if len(entries) else np.zeros(0, np.int64),
        bin=entries["bin"].to_numpy().astype(np.int64),
        count=entries["count"].to_numpy().astype(np.int64),
    )


def gauges_in(tables: TraceTables) -> Gauges | None:
    """What ready probes measured, or None if there were none."""
    outputs = tuple(f"{output}/" for outputs in scaler.observe.GAUGES.values() for output in outputs)
    names = [name for name in tables.steps.column_names if name.startswith(outputs)]
    if not names or not len(tables.steps):
        return None
    values = np.stack([_floats(tables.steps[name]) for name in names], axis=1)
    return Gauges(tables.steps["step"].to_numpy().astype(np.int64), tuple(names), values)


def _floats(column: Any) -> np.ndarray:
    """The column as float64, with NaN for null."""
    import pyarrow as pa

    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)
