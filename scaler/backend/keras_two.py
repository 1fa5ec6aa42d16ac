"""An optimizer of Keras 2, as the gate calls optimizers.

It comes from the package tf-keras, or from `tf.keras` with TF_USE_LEGACY_KERAS=1, and is known by its methods.

_index_dict        what it was built for             absent: tf-keras itself refuses other variables
_var_key           how it tells variables apart      absent: as above
_use_weight_decay  whether it decays a variable      absent: weight decay with masters is refused
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaler.backend import replicas
from scaler.backend.variables import outside_the_graph
from scaler.errors import InvalidArgument

_METHODS = ("apply_gradients", "build", "iterations", "variables")


def is_of_keras_two(optimizer: object) -> bool:
    """Whether it is such an optimizer; not one of those that tf-keras calls legacy, which have no `build`."""
    return not hasattr(optimizer, "apply") and all(hasattr(optimizer, name) for name in _METHODS)


class KerasTwo:
    """Calls `apply_gradients` with gradients that are summed over the replicas already.

    Args:
        optimizer: For which `is_of_keras_two` is true.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self.__name__ = type(optimizer).__name__

    @property
    def variables(self) -> list:
        """Slots, iterations, the learning rate."""
        found = self._optimizer.variables
        return list(found() if callable(found) else found)

    def build(self, variables: Sequence) -> None:
        """Creates the slots, unless they are there.

        Raises:
            InvalidArgument: If it was built for other variables, or decays a master whose variable it does not decay.
        """
        natives = list(map(replicas.native, variables))
        with outside_the_graph():
            self._optimizer.build(natives)
        known, key_of = getattr(self._optimizer, "_index_dict", None), getattr(self._optimizer, "_var_key", None)
        if known is not None and key_of is not None and any(key_of(variable) not in known for variable in natives):
            raise InvalidArgument(
                f"apply: the optimizer {self._optimizer.name!r} was built for other variables than {natives[0].name!r} "
                "and those beside it. One optimizer goes with one MasterWeights, or with one list of variables: make a "
                "new one."
            )
        self._check_decay([master for master in variables if hasattr(master, "copy_of")])

    def _check_decay(self, masters: Sequence) -> None:
        if not masters or not getattr(self._optimizer, "weight_decay", None):
            return
        decays = getattr(self._optimizer, "_use_weight_decay", None)
        for master in masters:
            if decays is None or bool(decays(master)) != bool(decays(replicas.native(master.copy_of))):
                raise InvalidArgument(
                    f"apply: {self.__name__} leaves variable {master.name!r} out of its weight decay, but would decay "
                    "its float32 master. Exclude it by its name, exclude_from_weight_decay(var_names=[...]), or use an "
                    "optimizer of Keras 3."
                )

    def apply(self, grads: Sequence, variables: Sequence) -> None:
        """Moves the variables. On several replicas each calls it with the same gradients."""
        pairs = zip(grads, map(replicas.native, variables), strict=True)
        self._optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
