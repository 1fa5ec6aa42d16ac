"""What a checkpoint is asked for while it is restored.

_lookup_dependency   is called for each part of an object   absent: a checkpoint of an optimizer that was not wrapped
is restored without its slots; said once
"""

from __future__ import annotations

from typing import Any

import keras

from scaler.backend.versions import say_once


class AskedForParts:
    """Has `check_part` called with each part that a checkpoint looks for in an object, before it is given a value."""

    def check_part(self, name: str, cached_dependencies: dict | None) -> None:
        """Raises for a part that is not to be restored.

        Args:
            name: The part's name in the checkpoint.
            cached_dependencies: The parts that the object has.
        """

    def _lookup_dependency(self, name: str, cached_dependencies: dict | None = None) -> Any:
        self.check_part(name, cached_dependencies)
        parent: Any = super()
        return parent._lookup_dependency(name, cached_dependencies)


def say_if_never_asked() -> None:
    """Warns, once, where nobody calls `check_part`."""
    if not hasattr(keras.optimizers.Optimizer, "_lookup_dependency"):
        say_once(
            "does not tell what a checkpoint looks for: that of an optimizer without a loss scaler is restored into a "
            "LossScaleOptimizer without its slots, in silence. Restore it into optimizer.inner_optimizer."
        )
