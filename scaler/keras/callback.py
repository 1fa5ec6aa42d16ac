"""Reports the loss scale and skipped steps in the logs of `fit`."""

from __future__ import annotations

import contextlib
import warnings

import keras

from scaler.authoring import watch_from_here
from scaler.errors import InvalidArgument, ScaleWarning
from scaler.gate.loss_scaler import LossScaler
from scaler.keras.protect import is_protected, loss_scale_optimizers, not_restored
from scaler.outcome.stuck import StuckPolicy
from scaler.weights.trainable import TrainableSet

_TRACED_FOR = "scaler_traced_for"


class LossScaleLogger(keras.callbacks.Callback):
    """Adds the loss scale and the skips to `logs`, and stops a run that makes no progress.

        model.fit(x, y, callbacks=[scaler.LossScaleLogger(), keras.callbacks.CSVLogger("run.csv")])

    The progress bar, the history and later callbacks in the list see three numbers for each batch and each epoch:
    `loss_scale`; `skipped_steps`, counted since the optimizer was created; and `last_skip`, the `Cause` of the last
    skip as a number, 0 if there was none. `model.optimizer.loss_scaler.explain()` explains it in words.

    A model may hold several `LossScaleOptimizer`s, as a GAN does. Each is then logged under the name of the attribute
    that holds it: `d_optimizer_loss_scale`, `optimizers_0_loss_scale` in a list, `critic_optimizer_loss_scale` for that
    of a compiled model `critic` inside.

    A model keeps its compiled step until `compile` is called again, also for the next `fit`. If layers were frozen or
    unfrozen since, the callback refuses to go on with it, when `fit` or the next epoch begins.

    The callback reads a few numbers whenever `fit` returns to the host, every `steps_per_execution` steps.

    Args:
        stuck: When the scaler counts as stuck, and what happens then. Default: the policy of its `LossScaler`, which is
            `StuckPolicy()` unless changed. That raises after a hundred skipped steps in a row, or when more than seven
            in ten of the last 200 were skipped.

    Raises:
        InvalidArgument: If `stuck` is not a `StuckPolicy`. Also when training starts on a model without a
            `LossScaleOptimizer`, and from `fit` if it would go on with an old list of trainable variables.
        StuckError: From `fit`, if the scaler is stuck and the policy says "raise".
    """

    def __init__(self, *, stuck: StuckPolicy | None = None):
        super().__init__()
        if stuck is not None and not isinstance(stuck, StuckPolicy):
            raise InvalidArgument(f"LossScaleLogger(stuck={stuck!r}): expected an hs.StuckPolicy, or None.")
        self._stuck = stuck
        self._scalers: dict[str, LossScaler] = {}
        self._skipped: int | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Finds the optimizers."""
        found = loss_scale_optimizers(self.model)
        if not found:
            raise InvalidArgument(
                f"LossScaleLogger: the model's optimizer is a {_called(self.model.optimizer)}: expected an "
                "hs.LossScaleOptimizer, as in compile(hs.LossScaleOptimizer(keras.optimizers.Adam()), ...), or "
                "attributes of the model that are such optimizers." + not_restored(self.model)
            )
        alone = len(found) == 1
        self._scalers = {"" if alone else f"{name}_": optimizer.loss_scaler for name, optimizer in found.items()}
        for loss_scaler in self._scalers.values():
            if self._stuck is not None:
                loss_scaler.stuck = self._stuck
            watch_from_here(loss_scaler)
        # A train step of the user's own may put back what it moves.
        own = type(self.model).train_step is not keras.Model.train_step
        self._skipped = None if own or is_protected(self.model) else self._count_skips()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Refuses a compiled step that was traced for other trainable variables."""
        traced_for = getattr(getattr(self.model, "train_function", None), _TRACED_FOR, None)
        if traced_for is not None:
            traced_for.keep(f"fit of model {self.model.name!r}", "Compile the model again.")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Adds to the logs of the batch, then checks whether a scaler is stuck."""
        self._note_what_is_trainable()
        self._add(logs)
        for loss_scaler in self._scalers.values():
            loss_scaler.check()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds to the logs of the epoch, and says once if a skipped batch moved what only `protect` puts back."""
        self._add(logs)
        skips = 0 if self._skipped is None else self._count_skips() - self._skipped
        if skips:
            self._skipped = None
            warnings.warn(
                f"fit of model {self.model.name!r}: {skips} {'step was' if skips == 1 else 'steps were'} skipped, and "
                "the forward passes moved metrics and BatchNorm's statistics all the same. Call hs.protect(model) "
                "after compile and after load_model: it puts them back.",
                ScaleWarning,
                stacklevel=2,
            )

    def _count_skips(self) -> int:
        return sum(int(loss_scaler.counters.skipped) for loss_scaler in self._scalers.values())

    def _note_what_is_trainable(self) -> None:
        """Keeps it with the compiled step, which by now is traced and has made its variables."""
        function = getattr(self.model, "train_function", None)
        # An eager step asks the model each time.
        if function is None or self.model.run_eagerly or hasattr(function, _TRACED_FOR):
            return
        with contextlib.suppress(AttributeError):  # A function of the user's own may be an object that takes none.
            setattr(function, _TRACED_FOR, TrainableSet.of(self.model.weights))

    def _add(self, logs: dict | None) -> None:
        if logs is None:
            return
        for name, loss_scaler in self._scalers.items():
            logs[f"{name}loss_scale"] = float(loss_scaler.loss_scale)
            logs[f"{name}skipped_steps"] = int(loss_scaler.counters.skipped)
            logs[f"{name}last_skip"] = int(loss_scaler.last_skip.cause)


def _called(optimizer: object) -> str:
    # Under the policy mixed_float16 `compile` wraps an optimizer, or the name of one, in Keras's own class.
    kind = type(optimizer)
    return f"keras.optimizers.{kind.__name__}" if kind is keras.optimizers.LossScaleOptimizer else kind.__name__
