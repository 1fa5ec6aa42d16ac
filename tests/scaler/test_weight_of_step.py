"""Guards what the plainest step weighs: operations of its graph, and what XLA's program holds.

These are upper limits, at what was counted. A change that saves lowers them; one that adds says what for, and raises
them. `benchmarks/weight_of_step.py` prints the same beside no scaler, beside Keras's, and with times.
"""

import pytest
import tensorflow as tf
import ways
import weight_cases
from versions import newest_pinned

pytestmark = [
    newest_pinned,
    pytest.mark.skipif(ways.selects("graph"), reason="counted on a CPU, where a step in a graph branches by default"),
]

OPERATIONS = {"by_hand": 450, "train_step": 477, "selecting": 429}
PROGRAM = {"parameters": 27, "fusions": 74, "conditionals": 0}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_holds_no_more_operations(name):
    graph = tf.function(getattr(weight_cases, name)()).get_concrete_function().graph
    found = len(list(weight_cases.all_operations(graph)))
    assert found <= OPERATIONS[name]


@pytest.mark.dear("XLA compiles a whole step")
def test_a_program_holds_no_more():
    """Where XLA compiles all of it, every step selects, and this one holds what one by hand does."""
    found = weight_cases.program(tf.function(weight_cases.train_step(), jit_compile=True))
    assert {what: count for what, count in found.items() if count > PROGRAM[what]} == {}
