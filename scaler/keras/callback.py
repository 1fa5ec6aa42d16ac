"""What the scaler does, in the logs of `fit`."""

from __future__ import annotations

import keras

from scaler.errors import InvalidArgument
from scaler.keras.of_model import loss_scale_optimizers
from scaler.loss_scaler import LossScaler
from scaler.stuck import StuckPolicy


class LossScaleLogger(keras.callbacks.Callback):
    """Puts the loss scale and the skips into `logs`, and stops a run that makes no progress.

        model.fit(x, y, callbacks=[scaler.LossScaleLogger(), keras.callbacks.CSVLogger("run.csv")])

    Callbacks after it in the list, the progress bar and the history see, for each batch and each epoch: `loss_scale`;
    `skipped_steps`, since the optimizer was made; `last_skip`, the `Cause` of the last one as a number, 0 if there was
    none. `model.optimizer.loss_scaler.explain()` says it in words.

    A model may have several `LossScaleOptimizer`s as attributes, as a GAN does. Each is then logged under the
    attribute's name: `d_optimizer_loss_scale`.

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
        self._scalers: dict[str, LossScaler] = {}

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Finds the optimizers."""
        found = loss_scale_optimizers(self.model)
        if not found:
            raise InvalidArgument(
                f"LossScaleLogger: the model's optimizer is a {_called(self.model.optimizer)}: expected a "
                "scaler.LossScaleOptimizer, as in compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), ...), or "
                "several as attributes of the model."
            )
        alone = len(found) == 1
        self._scalers = {"" if alone else f"{name}_": optimizer.loss_scaler for name, optimizer in found.items()}
        for loss_scaler in self._scalers.values():
            if self._stuck is not None:
                loss_scaler.stuck = self._stuck
            loss_scaler.watch_from_here()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Adds to the logs of the batch, then asks the stuck policy."""
        self._add(logs)
        for loss_scaler in self._scalers.values():
            loss_scaler.check()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds to the logs of the epoch."""
        self._add(logs)

    def _add(self, logs: dict | None) -> None:
        if logs is None:
            return
        for name, loss_scaler in self._scalers.items():
            logs[f"{name}loss_scale"] = float(loss_scaler.loss_scale)
            logs[f"{name}skipped_steps"] = int(loss_scaler.counters.skipped)
            logs[f"{name}last_skip"] = int(loss_scaler.last_skip.cause)


def _called(optimizer: object) -> str:
    # Keras puts its own around a name or an optimizer that is compiled under the policy mixed_float16.
    kind = type(optimizer)
    return f"keras.optimizers.{kind.__name__}" if kind is keras.optimizers.LossScaleOptimizer else kind.__name__
