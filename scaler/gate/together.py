"""Several optimizers about which one scaler decides: all of them move, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.autograph import no_autograph
from scaler.checks import as_flag, as_variables
from scaler.errors import InvalidArgument
from scaler.gate.arguments import check_apply, check_arguments
from scaler.gate.rollback import Snapshot
from scaler.gate.targets import Share
from scaler.gradients.pairs import as_list, check_pairs
from scaler.outcome.outcome import Outcome

if TYPE_CHECKING:
    from scaler.gate.loss_scaler import LossScaler


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
    _check_owned_once(variable for one in shares for variable in _moved_by(one))
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


def _check_owned_once(variables: Iterable) -> None:
    """Refuses a variable that two optimizers would move."""
    seen: set[int] = set()
    for variable in variables:
        if id(replicas.native(variable)) in seen:
            raise InvalidArgument(
                f"apply_together: variable {getattr(variable, 'path', variable.name)!r} is there twice, and each "
                "optimizer would move it: expected each variable in one share."
            )
        seen.add(id(replicas.native(variable)))
