"""The two ways in which a step keeps a skip from moving anything: it selects its new values, or it branches."""

import functools

import pytest
import tensorflow as tf

from scaler.gate import proofs


def select_always():
    """Has steps of graphs select, as on a GPU."""
    proofs.selects_by_default = lambda: True


def selects(mode):
    """Whether a step in one of the `MODES` selects."""
    return mode == "xla" or (mode != "eager" and proofs.selects_by_default())


second_look = pytest.mark.second_look
"""A test of what only a step that branches tells, because it looks at gradients or weights again."""

graph = functools.partial(tf.function, autograph=False)
"""A function without loops and branches in Python, which AutoGraph would only take time to rewrite."""
