"""Learning rates that follow attempted steps, skipped ones included."""

from __future__ import annotations

from typing import Any

import keras

import scaler


class ByAttempts(keras.optimizers.schedules.LearningRateSchedule):
    """A Keras schedule over the steps a loss scaler attempted, where Keras's own count is of the applied ones.

        loss_scaler = scaler.LossScaler(scaler.Dynamic())
        cosine = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=10_000)
        optimizer = keras.optimizers.Adam(loops.ByAttempts(cosine, loss_scaler))

    With it, a run of n windows ends at the schedule's end, however many of them were skipped; without it, the schedule
    waits at every skip, as the optimizer's moments do. It has no state of its own: it reads `loss_scaler.counters`,
    which is saved wherever the scaler is.

    Args:
        schedule: Any function of a step, counted from 0, to a learning rate.
        loss_scaler: The one whose `apply` the optimizer is given to. Where it counts several `apply` a step, give
            these `update=False` and call its `update` once.

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
            raise scaler.InvalidArgument(f"ByAttempts(loss_scaler={loss_scaler!r}): expected a scaler.LossScaler.")
        self.schedule = schedule
        self.loss_scaler = loss_scaler

    def __call__(self, step: Any) -> Any:
        """The learning rate of the step that is attempted now.

        Args:
            step: Of the optimizer, which is not looked at.
        """
        del step
        return self.schedule(self.loss_scaler.counters.attempted)

    def get_config(self) -> dict:
        """The schedule, for those who compare optimizers; the scaler is no configuration."""
        return {"schedule": keras.optimizers.schedules.serialize(self.schedule)}

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> ByAttempts:
        """Refused: a configuration has no loss scaler.

        Raises:
            scaler.InvalidArgument: Always.
        """
        raise scaler.InvalidArgument(
            "ByAttempts cannot be made from a configuration, which has no loss scaler: make the optimizer as the run "
            "did, and restore its variables from the checkpoint."
        )
