"""How large a tensor's values are."""

from __future__ import annotations

from typing import Any

import numpy as np


def magnitude(values: Any) -> tuple[float, bool]:
    """The largest magnitude of an array's numbers, NaN left out, and whether it holds a NaN.

    Args:
        values: A tensor or an array; of complex numbers both parts count. Nothing is the largest of an empty one: 0.
    """
    numbers = np.asarray(values).reshape(-1)
    if numbers.dtype.kind == "c":
        numbers = np.ascontiguousarray(numbers).view(numbers.real.dtype)
    # NumPy is slow with 16 bits, and float32 holds all of their values.
    narrow = numbers.dtype.itemsize <= 2
    sizes = np.abs(numbers.astype(np.float32 if narrow else np.result_type(numbers.dtype, np.float32)))
    return float(np.fmax.reduce(sizes, initial=0.0)), bool(np.isnan(np.max(sizes, initial=0.0)))
