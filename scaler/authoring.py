"""For authors of train steps and loops: what `loops` needs of `scaler` beside its other public names.

A step of your own needs none of it. It is for those who write a step that others give their models to, such as
`loops.TrainStep`: to notice mistakes early, and to say how `tf.function` traces the parts of a step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from scaler.backend.autograph import nested, no_autograph, with_user_autograph
from scaler.backend.graphs import at_each_call, repeat_checks
from scaler.backend.layers import alive, calls_through, direction_of
from scaler.backend.variables import outside_the_graph, owner_of
from scaler.checks import did_you_mean, from_keras, suggest_arguments, takes_one
from scaler.gate.layer_state import LayerState
from scaler.gate.proofs import selects_here
from scaler.gate.shares import check_arguments
from scaler.gradients.lists import Gradient
from scaler.misuse.losses import divided_sum, float16_loss, float16_probabilities
from scaler.misuse.moving_statistics import no_forward_pass, warn_of_narrow_statistics
from scaler.misuse.operations import operation_of_type
from scaler.misuse.verdicts import without_gradient

if TYPE_CHECKING:
    from scaler.gate.loss_scaler import LossScaler

__all__ = [
    "LayerState",
    "alive",
    "apply_replaced",
    "at_each_call",
    "calls_through",
    "check_arguments",
    "check_connected",
    "check_precision",
    "did_you_mean",
    "direction_of",
    "from_keras",
    "nested",
    "no_autograph",
    "no_forward_pass",
    "operation_of_type",
    "outside_the_graph",
    "owner_of",
    "reading",
    "repeat_checks",
    "selects",
    "spike_limits",
    "suggest_arguments",
    "takes_one",
    "warn_of_narrow_statistics",
    "warn_of_no_decision",
    "warn_of_unseen_loss",
    "watch_from_here",
    "with_user_autograph",
]


def selects(loss_scaler: LossScaler) -> bool:
    """Whether steps that are traced now select their new values, where the optimizer allows it."""
    return selects_here(loss_scaler.select)


def check_precision(loss_scaler: LossScaler, prediction: Any, loss: Any) -> None:
    """Warns once about probabilities or a loss in float16, for a step that casts the loss before `scale`.

    On several replicas also about a loss that is a sum: such a step divides it by their number.
    """
    say_once = loss_scaler._calls.use.say_once
    say_once(float16_probabilities(prediction))
    say_once(divided_sum(loss) if tf.is_tensor(loss) else None)
    say_once(float16_loss(loss))


def check_connected(loss_scaler: LossScaler, grads: Sequence[Gradient], variables: Sequence) -> None:
    """Warns once of variables that have no gradient, while others have one.

    `apply` does so itself, unless it gets `update=False`, `when`, or a function in place of an optimizer: such a step
    may be meant to train a part of the variables. Call it where a step differentiates all of a model.

    Args:
        loss_scaler: Who warns.
        grads: One for each variable.
        variables: All that the step trains.
    """
    loss_scaler._calls.use.say_once(without_gradient(grads, variables))


def warn_of_unseen_loss(loss_scaler: LossScaler, step: str) -> None:
    """Warns once that a step was applied though its loss was not finite. `check` sees only the last step.

    Args:
        loss_scaler: Who warns.
        step: Which one, as the beginning of a sentence, such as "Step 12".
    """
    loss_scaler._calls.warn_of_unseen_loss(step)


def warn_of_no_decision(loss_scaler: LossScaler, steps: int) -> None:
    """Warns once if losses were scaled in steps that counted nothing, as with a `when` that is never True.

    Args:
        loss_scaler: Who warns.
        steps: How many such steps there were, up to now.
    """
    attempted = loss_scaler.counters.attempted
    loss_scaler._calls.use.check_decided(loss_scaler._called, steps, int(attempted), loss_scaler._calls.step)


def reading(loss_scaler: LossScaler) -> tf.Tensor:
    """What `check` looks at, as one tensor, float64 [7], for a `tf.function` to return with other results."""
    return loss_scaler._reading()


def spike_limits(loss_scaler: LossScaler) -> dict[str, tf.Tensor]:
    """What a `SpikeGuard` allows the next step, scalar float32, as "norm_limit" and "loss_limit"."""
    return loss_scaler._spikes.limits()


@contextlib.contextmanager
def apply_replaced(loss_scaler: LossScaler, apply: Callable) -> Iterator[None]:
    """Within this context `apply` and `apply_together` leave the step to a function, once they have checked it.

    Args:
        loss_scaler: The one that is asked to apply.
        apply: It gets the function that it replaces, a list of `scaler.Share`, and the other arguments by name. It
            returns what the former returns: the outcome of the step, and one for each share.
    """
    before = vars(loss_scaler).get("_apply_shares")  # Of a context around this one.
    # TensorFlow's modules track what is assigned to them in the ordinary way.
    object.__setattr__(loss_scaler, "_apply_shares", functools.partial(apply, loss_scaler._apply_shares))
    try:
        yield
    finally:
        object.__delattr__(loss_scaler, "_apply_shares")
        if before is not None:
            object.__setattr__(loss_scaler, "_apply_shares", before)


def watch_from_here(loss_scaler: LossScaler) -> None:
    """Makes `check` ignore all earlier steps, unless it ran already: for a scaler loaded from a file."""
    loss_scaler._watch.history.begin(loss_scaler._stored.read())
