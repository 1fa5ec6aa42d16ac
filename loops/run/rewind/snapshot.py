"""Variables, tables, iterators and random generators as they were at one moment."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from loops.loop.state.held import Held
from loops.loop.state.randomness import generators, set_generators


class Snapshot:
    """Copies of variables in the host's memory, bit for bit, and the state of the process's random generators.

    Args:
        variables: Each on one device, as `loops.loop.state.variables.components` gives them.
        held: The step's tables and iterators.
        kernels: As for `loops.loop.state.randomness.set_generators`: needed if a step has random operations without a
            generator, to have it draw the same numbers each time.
    """

    def __init__(self, variables: Iterable[tf.Variable], held: Held, *, kernels: bool = False):
        # NumPy may be given the memory of the variable itself.
        self._saved = [(variable, np.array(variable.numpy())) for variable in variables]
        self._restore_held = held.snapshot()
        self._generators, self._kernels = generators(), kernels

    def restore(self) -> None:
        """Puts all of them back."""
        for variable, value in self._saved:
            variable.assign(tf.constant(value, variable.dtype))
        self._restore_held()
        set_generators(self._generators, kernels=self._kernels)
