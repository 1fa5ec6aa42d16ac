"""What a restored checkpoint holds for parts of an object that are not made yet.

_deferred_dependencies    the values that an object keeps for     absent: nothing is known of them, and a save
                            parts that it lacks; their shapes       before the first step loses them; one warning
                            by `object_graph_proto`, `shape_map`
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from scaler.backend.versions import say_once


def awaited_shape(owner: Any, part: str, variable: str) -> tf.TensorShape | None:
    """The shape of a variable whose value waits for the part of an object that will hold it; None if none does.

    Args:
        owner: A `tf.Module` into which a checkpoint was restored, in eager mode.
        part: The name of a dict that the object does not have yet.
        variable: A key of the dict.
    """
    try:
        waiting = owner._deferred_dependencies.get(part, ())
        if not waiting:
            return None
        newest = max(waiting, key=lambda one: one.restore_uid)
        nodes = newest.checkpoint.object_graph_proto.nodes
        (number,) = (one.node_id for one in newest.object_proto.children if one.local_name == variable)
        return tf.TensorShape(newest.checkpoint.shape_map[nodes[number].attributes[0].checkpoint_key])
    except (AttributeError, TypeError, ValueError, KeyError, IndexError):
        say_once(
            "does not tell what a checkpoint holds of a SpikeGuard(by_tensor=...): saved again before the next step, "
            "its windows are lost."
        )
        return None


def scope_of(variable: tf.Variable) -> Any:
    """The scope of the `tf.distribute` strategy whose variable it is."""
    strategy = getattr(variable, "distribute_strategy", None)
    return (strategy or tf.distribute.get_strategy()).scope()
