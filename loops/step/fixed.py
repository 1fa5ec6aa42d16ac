"""What the trace of a `TrainStep` has fixed, so that a change afterwards is refused and not ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import scaler

if TYPE_CHECKING:
    from loops.step.train_step import TrainStep

_SETTINGS = ("optimizer", "loss_fn", "loss_scaler", "clip_norm", "clip", "accumulate", "retry")


def keep_fixed(step: TrainStep) -> None:
    """Refuses changes of a step's settings and of its model's layers at later calls of the function being traced.

    Raises:
        scaler.InvalidArgument: With what was changed.
    """
    traced = _fixed(step)

    def check(now: dict[str, Any]) -> None:
        changed = [name for name, value in now.items() if value != traced[name]]
        if changed:
            raise scaler.InvalidArgument(
                f"TrainStep of model {step.model.name!r}: changed since it was traced: {', '.join(changed)}. Its "
                "compiled function would go on with what it was traced with. Make a new TrainStep, and a new Loop or "
                "tf.function around it."
            )

    scaler.tracing.at_each_call(lambda: _fixed(step), check, ("fixed", id(step)))


def _fixed(step: TrainStep) -> dict[str, Any]:
    settings = {name: _known_by(getattr(step, name)) for name in _SETTINGS}
    return {"the model's layers": tuple(map(id, step.model.layers)), **settings}


def _known_by(setting: object) -> object:
    return setting if isinstance(setting, (int, float)) else id(setting)
