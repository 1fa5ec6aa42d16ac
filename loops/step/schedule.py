"""Learning rates that follow attempted steps, skipped ones included."""

from __future__ import annotations

from typing import Any

import keras

import scaler


class ByAttempts(keras.optimizers.schedules.LearningRateSchedule):
    """A Keras schedule over the steps that a loss scaler attempted; Keras itself counts only applied steps.

        loss_scaler = scaler.LossScaler(scaler.Dynamic())
        cosine = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=10_000)
        optimizer = keras.optimizers.Adam(loops.ByAttempts(cosine, loss_scaler))

    With it, a run of n windows ends at the schedule's end, however many of them were skipped. Without it, the schedule
    pauses at every skip, as the optimizer's moments do. It has no state: it reads `loss_scaler.counters`, which are
    saved with the scaler.

    Args:
        schedule: Any function from a step, counted from 0, to a learning rate.
        loss_scaler: The scaler whose `apply` gets the optimizer. If a step calls `apply` several times, pass
            `update=False` and call its `update` once.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule, loss_scaler: scaler.LossScaler):
        if not callable(schedule):
            raise scaler.InvalidArgument(
                f"ByAttempts(schedule={schedule!r}): expected a schedule of keras.optimizers.schedules, or a "
                "function of the step."
            )
        if not isinstance(loss_scaler, scaler.LossScaler):
            raise scaler.InvalidArgument(f"ByAttempts(loss_scaler={loss_scaler!r}): expected an hs.LossScaler.")
        self.schedule = schedule
        self.loss_scaler = loss_scaler

    def __call__(self, step: Any) -> Any:
        """The learning rate of the step that is attempted now.

        Args:
            step: The optimizer's step, which is ignored.
        """
        del step
        return self.schedule(self.loss_scaler.counters.attempted)

    def get_config(self) -> dict:
        """The schedule's configuration, for comparing optimizers. The scaler is not part of it."""
        return {"schedule": keras.optimizers.schedules.serialize(self.schedule)}

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> ByAttempts:
        """Refuses: a configuration has no loss scaler.

        Raises:
            scaler.InvalidArgument: Always.
        """
        raise scaler.InvalidArgument(
            "ByAttempts cannot be made from a configuration, which has no loss scaler: make the optimizer as the run "
            "did, and restore its variables from the checkpoint."
        )
