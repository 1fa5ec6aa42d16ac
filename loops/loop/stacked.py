"""The outputs of many steps, stacked in the graph: scalars of one dtype share an array.

Each array costs a step of a small model several microseconds, and a `TrainStep` returns eight scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from loops.loop.packing import Layout

Arrays = dict[str, tf.TensorArray]


class Stacked:
    """Which array holds each output of a step.

    Args:
        specs: The outputs of one step, by name: scalars and arrays of a known shape.
    """

    def __init__(self, specs: Mapping[str, tf.TensorSpec]):
        self._specs = dict(specs)
        self._columns: dict[str, list[str]] = {}
        for name, spec in specs.items():
            # Both keys have a prefix, so that no name of an output can equal another output's key.
            key = f"scalars of {spec.dtype.name}" if spec.shape.rank == 0 else f"array {name}"
            self._columns.setdefault(key, []).append(name)

    def arrays(self, size: tf.Tensor) -> Arrays:
        """Empty arrays.

        Args:
            size: The most steps that they hold, a scalar int32.
        """
        made = {}
        for key, names in self._columns.items():
            first = self._specs[names[0]]
            shape = [len(names)] if first.shape.rank == 0 else first.shape
            made[key] = tf.TensorArray(first.dtype, size=size, element_shape=shape)
        return made

    def write(self, arrays: Arrays, step: tf.Tensor, outputs: Mapping[str, tf.Tensor]) -> Arrays:
        """The arrays with the outputs of one step added.

        Args:
            arrays: From `arrays`.
            step: The index of the step within the call, a scalar int32.
            outputs: What the step returned.
        """
        return {key: array.write(step, self._row(key, outputs)) for key, array in arrays.items()}

    def rows(self, outputs: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """The outputs of a single step as one row of each array, in the order of the arrays."""
        return [self._row(key, outputs) for key in self._columns]

    def stack(self, arrays: Arrays) -> list[tf.Tensor]:
        """The arrays as tensors [size, ...], in their order."""
        return [arrays[key].stack() for key in self._columns]

    def layout(self, size: int) -> Layout:
        """The dtype and the shape of each array for `size` steps, in their order."""
        shapes = []
        for names in self._columns.values():
            first = self._specs[names[0]]
            shapes.append((first.dtype, [size, *(first.shape if first.shape.rank else [len(names)])]))
        return shapes

    def split(self, arrays: Sequence[np.ndarray], taken: int) -> dict[str, np.ndarray]:
        """Splits the stacked arrays on the host into one array [taken, ...] for each output."""
        found = {}
        for array, names in zip(arrays, self._columns.values(), strict=True):
            whole = array[:taken]
            scalars = self._specs[names[0]].shape.rank == 0
            found.update({name: whole[:, place].copy() if scalars else whole for place, name in enumerate(names)})
        return {name: found[name] for name in self._specs}

    def _row(self, key: str, outputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        names = self._columns[key]
        return outputs[names[0]] if self._specs[names[0]].shape.rank else tf.stack([outputs[name] for name in names])
