"""What a checkpoint restores into an object: the parts that it looks up, and values that wait for parts not yet made.

_lookup_dependency       is called for each part of an object     absent: a checkpoint of an optimizer that was not
                                                                    wrapped is restored without its slots; one warning
_deferred_dependencies   the values that an object keeps for      absent: nothing is known of them, and a save
                           parts that it lacks; their shapes        before the first step loses them; one warning
                           by `object_graph_proto`, `shape_map`
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from scaler.backend.versions import say_once


class ChecksRestoredParts:
    """Calls `check_part` with each part that a checkpoint looks up in an object, before the part is restored."""

    def check_part(self, name: str, cached_dependencies: dict | None) -> None:
        """Raises an error for a part that must not be restored.

        Args:
            name: The part's name in the checkpoint.
            cached_dependencies: The parts that the object has.
        """

    def _lookup_dependency(self, name: str, cached_dependencies: dict | None = None) -> Any:
        self.check_part(name, cached_dependencies)
        parent: Any = super()
        return parent._lookup_dependency(name, cached_dependencies)


def warn_if_hook_missing() -> None:
    """Warns once if these versions never call `check_part`."""
    if not hasattr(keras.optimizers.Optimizer, "_lookup_dependency"):
        say_once(
            "does not tell what a checkpoint looks for: a checkpoint of an optimizer that was not wrapped is silently "
            "restored into a LossScaleOptimizer without its slots. Restore it into optimizer.inner_optimizer."
        )


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
