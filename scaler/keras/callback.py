"""What the scaler does, in the logs of `fit`."""

from __future__ import annotations

import keras

from scaler.errors import InvalidArgument
from scaler.keras.optimizer import LossScaleOptimizer
from scaler.stuck import StuckPolicy


class LossScaleLogger(keras.callbacks.Callback):
    """Puts the loss scale and the skips into `logs`, and stops a run that makes no progress.

        model.fit(x, y, callbacks=[scaler.LossScaleLogger(), keras.callbacks.CSVLogger("run.csv")])

    Callbacks after it in the list, the progress bar and the history see, for each batch and each epoch: `loss_scale`;
    `skipped_steps`, since the optimizer was made; `last_skip`, the `Cause` of the last one as a number, 0 if there was
    none. `model.optimizer.loss_scaler.explain()` says it in words.

    It reads a few numbers each time `fit` visits the host: every `steps_per_execution` steps.

    Args:
        stuck: When the scaler counts as stuck and what happens then; without one, what its `LossScaler` has:
            `StuckPolicy()`, an error after a hundred skipped steps in a row, or more than seven in ten of the last 200.

    Raises:
        InvalidArgument: For no `StuckPolicy`; when training starts, for a model without a `LossScaleOptimizer`.
        StuckError: From `fit`, when the policy finds the scaler stuck and says "raise".
    """

    def __init__(self, *, stuck: StuckPolicy | None = None):
        super().__init__()
        if stuck is not None and not isinstance(stuck, StuckPolicy):
            raise InvalidArgument(f"LossScaleLogger(stuck={stuck!r}): expected a scaler.StuckPolicy, or None.")
        self._stuck = stuck

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Finds the optimizer."""
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            raise InvalidArgument(
                f"LossScaleLogger: the model's optimizer is a {type(self.model.optimizer).__name__}: expected a "
                "scaler.LossScaleOptimizer."
            )
        if self._stuck is not None:
            self.model.optimizer.loss_scaler.stuck = self._stuck
        self.model.optimizer.loss_scaler.watch_from_here()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Adds to the logs of the batch, then asks the stuck policy."""
        self._add(logs)
        self.model.optimizer.loss_scaler.check()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds to the logs of the epoch."""
        self._add(logs)

    def _add(self, logs: dict | None) -> None:
        if logs is not None:
            loss_scaler = self.model.optimizer.loss_scaler
            logs["loss_scale"] = float(loss_scaler.loss_scale)
            logs["skipped_steps"] = int(loss_scaler.counters.skipped)
            logs["last_skip"] = int(loss_scaler.last_skip.cause)
