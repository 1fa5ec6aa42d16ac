"""Which parts of an object a checkpoint looks up while it is restored.

_lookup_dependency   is called for each part of an object   absent: a checkpoint of an optimizer that was not wrapped
is restored without its slots; one warning
"""

from __future__ import annotations

from typing import Any

import keras

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
