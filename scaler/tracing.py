"""How `tf.function` traces the parts of a step, for whoever writes a class of steps."""

from scaler.backend.autograph import as_called, as_written, nested
from scaler.backend.graphs import at_each_call
from scaler.backend.layers import alive
from scaler.backend.variables import made_outside
from scaler.gate.layer_state import LayerState
from scaler.mistakes.moving_statistics import no_forward_pass

__all__ = [
    "LayerState",
    "alive",
    "as_called",
    "as_written",
    "at_each_call",
    "made_outside",
    "nested",
    "no_forward_pass",
]
