"""What the optimizers of a step are given, and its checks. Of several under one scaler all move, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.autograph import no_autograph
from scaler.checks import as_flag, as_variables, takes_one
from scaler.errors import InvalidArgument
from scaler.gate.optimizers import check_optimizer
from scaler.gate.rollback import Snapshot
from scaler.gradients.clipping import ClipByNorm, ClipByValue, clipping_of
from scaler.gradients.lists import as_list, check_pairs
from scaler.outcome.outcome import Outcome
from scaler.weights.masters import MasterWeights

if TYPE_CHECKING:
    from scaler.gate.loss_scaler import LossScaler


class Share(NamedTuple):
    """What one of several optimizers takes of a step.

    Attributes:
        optimizer: A Keras optimizer, or a function `(grads, variables) -> None`.
        grads: Scaled gradients, one for each of its variables; None where there is none.
        variables: Its variables, or a `MasterWeights` over them. They belong to no other share.
        clip_norm: Largest global norm of its unscaled gradients, scalar float32, or None.
        clip: `ClipByNorm` or `ClipByValue` in place of `clip_norm`, or None.
    """

    optimizer: Any
    grads: Sequence
    variables: Any
    clip_norm: Any = None
    clip: Any = None

    @property
    def masters(self) -> MasterWeights | None:
        """The masters, if the variables are behind them."""
        return self.variables if isinstance(self.variables, MasterWeights) else None

    @property
    def weights(self) -> list:
        """The variables that the optimizer updates, one for each gradient."""
        return list(self.masters.weights if self.masters else self.variables)

    @property
    def positions(self) -> list[int]:
        """Where the variables that have a gradient stand among them."""
        return [position for position, grad in enumerate(self.grads) if grad is not None]

    @property
    def model(self) -> list:
        """Those of the model, which are others if masters are updated."""
        return list(self.masters.model_variables if self.masters else self.variables)


def check_arguments(
    optimizer: Any,
    *,
    clip_norm: float | tf.Tensor | None = None,
    clip: ClipByNorm | ClipByValue | None = None,
    who: str = "apply",
) -> None:
    """Checks the arguments that `apply` would refuse at the first step.

    Args:
        optimizer: As of `apply`.
        clip_norm: The same.
        clip: The same.
        who: What the user called, to begin the message with.

    Raises:
        InvalidArgument: If `optimizer` is not an optimizer or scales losses itself, or the clipping is invalid.
    """
    check_optimizer(optimizer, who)
    clipping_of(clip_norm, clip)


def check_apply(
    grads: Any, variables: Any, rollback: Any, functions: Mapping[str, Any], unscaled: Any, update: bool
) -> None:
    """Refuses arguments that cannot work.

    Args:
        grads: The gradients, None with `again`.
        variables: What the gradients belong to.
        rollback: A snapshot, or None.
        functions: The arguments `diagnose` and `again`, by name: functions, or None.
        unscaled: False, or whether the gradients are unscaled already.
        update: Whether the strategy sees this step.

    Raises:
        InvalidArgument: For the first that cannot.
    """
    if rollback is not None and not isinstance(rollback, Snapshot):
        raise InvalidArgument(
            f"apply(rollback={type(rollback).__name__}): expected hs.snapshot(model.non_trainable_variables), "
            "taken before the forward pass, or None."
        )
    for name, function in functions.items():
        if function is not None and not takes_one(function):
            raise InvalidArgument(f"apply({name}={function!r}): expected a function of a scalar tensor, or None.")
    if functions["again"] is not None:
        if grads is not None:
            raise InvalidArgument(
                "apply(grads, again=...): expected None for grads. `again` is called for them, with 1, so that the two "
                "cannot differ."
            )
        if unscaled is not False or not update:
            raise InvalidArgument(
                "apply(again=..., unscaled=... or update=False): a retry moves the scale at once, and takes scaled "
                "gradients. Do without `again` here."
            )
    if variables is None:
        raise InvalidArgument(
            "apply(optimizer, grads): expected two lists, apply(optimizer, grads, variables). Pairs of a gradient "
            "and a variable are for optimizer.apply_gradients alone."
        )


@no_autograph
def apply_together(
    loss_scaler: LossScaler,
    shares: Iterable[Share],
    *,
    rollback: Snapshot | None = None,
    when: bool | tf.Tensor = True,
    loss_scale: tf.Tensor | None = None,
    diagnose: Callable | None = None,
) -> tuple[Outcome, list[Outcome]]:
    """Applies a step of several optimizers under one scaler: all of them move, or none does, and it is counted once.

    The gradients are judged together. If they are finite each optimizer takes its own, one after another. Where one of
    them makes something else of them, what the others have moved is put back, and the step is a skipped one.

    Args:
        loss_scaler: The scaler. A `SpikeGuard` judges the norm of all gradients. It cannot be one with
            `by_tensor="clip"`, which limits the gradients of one optimizer.
        shares: One for each optimizer.
        rollback: What a skipped step restores: `snapshot(model.non_trainable_variables)`, taken before the forward
            pass.
        when: Scalar bool, whether there is a step. False does nothing, also at an overflow: see `LossScaler.apply`.
        loss_scale: Scalar float32, what the gradients carry; found as `apply` finds it if not given.
        diagnose: A function from an output gradient to the gradients of all shares.

    Returns:
        The outcome of the step, with the norms of all gradients; and for each share the same outcome, with the norms of
        its own.

    Raises:
        InvalidArgument: If there is no share, if two have one variable or one optimizer, or for what
            `LossScaler.apply` refuses. Nothing has moved then.
    """
    shares = _checked(loss_scaler, shares)
    seen: set[int] = set()
    for variable in (variable for one in shares for variable in _moved_by(one)):
        if id(replicas.native(variable)) in seen:
            raise InvalidArgument(
                f"apply_together: variable {getattr(variable, 'path', variable.name)!r} is there twice, and each "
                "optimizer would move it: expected each variable in one share."
            )
        seen.add(id(replicas.native(variable)))
    when = as_flag("apply_together: when", when)
    check_apply([], [], rollback, {"diagnose": diagnose, "again": None}, False, True)
    return loss_scaler._apply_shares(shares, rollback=rollback, when=when, loss_scale=loss_scale, diagnose=diagnose)


def _checked(loss_scaler: LossScaler, shares: Iterable) -> list[Share]:
    """The shares with lists in place of other iterables; raises `InvalidArgument` for what no optimizer can take."""
    if not hasattr(loss_scaler, "_stored"):
        raise InvalidArgument(
            f"apply_together({loss_scaler!r}, shares): expected the hs.LossScaler that scaled the loss."
        )
    if isinstance(shares, Share) or not isinstance(shares, Iterable):
        raise InvalidArgument(
            f"apply_together(loss_scaler, shares): the shares are of type {type(shares).__name__}: expected a list "
            "with an hs.Share for each optimizer."
        )
    found = list(shares)
    if not found:
        raise InvalidArgument("apply_together(loss_scaler, []): expected an hs.Share for each optimizer.")
    for at, one in enumerate(found):
        if not isinstance(one, Share):
            raise InvalidArgument(
                f"apply_together: entry {at} of the shares is of type {type(one).__name__}: expected an "
                "hs.Share(optimizer, grads, variables) for each optimizer."
            )
        where = f"apply_together, share {at}"
        given = one.masters or as_variables(where, one.variables)
        found[at] = one._replace(grads=as_list(where, one.grads), variables=given)
        try:
            check_arguments(one.optimizer, clip_norm=one.clip_norm, clip=one.clip)
            check_pairs(found[at].grads, found[at].weights, allow_16bit_updates=None)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None
        is_earlier = any(one.optimizer is other.optimizer for other in found[:at])
        if is_earlier and hasattr(one.optimizer, "apply"):
            raise InvalidArgument(
                f"{where}: its optimizer is that of an earlier share, and would count the step twice: expected one "
                "share for each optimizer. Give it the gradients and variables of both."
            )
    return found


def _moved_by(share: Share) -> list:
    """The variables that a share's optimizer moves, with those of the model that follow its masters."""
    masters = share.masters
    if masters is None:
        return share.weights
    # A float32 variable is its own master.
    own = {id(replicas.native(variable)) for variable in masters.weights}
    followers = [variable for variable in masters.model_variables if id(replicas.native(variable)) not in own]
    return [*masters.weights, *followers]
