"""Several optimizers about which one scaler decides: all of them move, or none does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.autograph import as_written
from scaler.backend.variables import without_values
from scaler.checks import as_variables
from scaler.errors import InvalidArgument
from scaler.gate.later import Later
from scaler.gate.optimizers import (
    as_called_by_the_gate,
    build_optimizer,
    check_optimizer,
    move_nothing,
    variables_of,
)
from scaler.gate.rollback import Snapshot
from scaler.gate.selecting import restore_where
from scaler.gradients.clipping import clipping_of
from scaler.gradients.pairs import as_list, check_pairs
from scaler.outcome.found_here import skipped_here
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


@as_written
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

    The gradients are judged together. If they are finite each optimizer takes its own. Where one of them makes
    something else of them, what the others have moved is put back, and the step is a skipped one.

    Args:
        loss_scaler: The scaler. Not one with a `SpikeGuard`, which judges what one `apply` is given.
        shares: One for each optimizer.
        rollback: What a skipped step restores: `snapshot(model.non_trainable_variables)`, taken before the forward
            pass.
        when: Scalar bool, whether there is a step. False does nothing, also at an overflow: see `LossScaler.apply`.
        loss_scale: Scalar float32, what the gradients carry; found as `apply` finds it if not given.
        diagnose: A function from an output gradient to the gradients of all shares.

    Returns:
        The outcome of the step, with the norm of all gradients, and those of the shares. `finite` is False in all of
        them if the step was skipped.

    Raises:
        InvalidArgument: If there is no share, if two have one variable or one optimizer, or for what
            `LossScaler.apply` refuses. Nothing has moved then.
    """
    shares = _checked(loss_scaler, shares)
    given = [one.variables.weights if isinstance(one.variables, MasterWeights) else one.variables for one in shares]
    _check_owned_once(variable for one in shares for variable in _moved_by(one))
    later = Later()
    judged = loss_scaler.apply(
        move_nothing,
        [grad for one in shares for grad in one.grads],
        [variable for variables in given for variable in variables],
        rollback=rollback,
        when=when,
        loss_scale=loss_scale,
        diagnose=diagnose,
        update=later,
    )
    # The judgement has restored `rollback` where it is a skip. None would have each `apply` look for a snapshot.
    nothing = None if rollback is None else Snapshot((), ())
    # Behind one that cannot move no other does, so that the last has moved nothing where any fails.
    before, moves, outcomes = _before(shares[:-1]), judged.finite, []
    with _put_back_after_an_error(before):
        for one in shares:
            found = loss_scaler.apply(
                one.optimizer,
                one.grads,
                one.variables,
                clip_norm=one.clip_norm,
                clip=one.clip,
                rollback=nothing,
                when=moves,
                loss_scale=judged.loss_scale,
                update=False,
            )
            outcomes.append(found)
            moves = found.finite
    failed = tf.logical_and(judged.finite, tf.logical_not(moves))
    undone = (
        before
        if rollback is None
        else Snapshot((*before.variables, *rollback.variables), (*before.values, *rollback.values))
    )
    _put_back(undone, failed, loss_scaler.selects())
    kept = loss_scaler._kept
    later.count(loss_scaler._stored, kept, failed, kept.kept_now(skipped_here(kept)))
    if any(one.clip_norm is not None or one.clip is not None for one in shares):
        squares = [tf.square(one.clipped_norm) for one in outcomes]
        judged = judged._replace(clipped_norm=tf.sqrt(tf.add_n(squares)))
    placed = _among_all(judged, outcomes, [len(variables) for variables in given])
    return _failing(judged, placed, failed), [_unless(one, failed) for one in outcomes]


def _checked(loss_scaler: LossScaler, shares: Iterable) -> list[Share]:
    """The shares with lists in place of other iterables; raises `InvalidArgument` for what no optimizer can take."""
    if not hasattr(loss_scaler, "_stored"):
        raise InvalidArgument(
            f"apply_together({loss_scaler!r}, shares): expected the scaler.LossScaler that scaled the loss."
        )
    if isinstance(shares, Share) or not isinstance(shares, Iterable):
        raise InvalidArgument(
            f"apply_together(loss_scaler, shares): the shares are of type {type(shares).__name__}: expected a list "
            "with a scaler.Share for each optimizer."
        )
    found = list(shares)
    if not found:
        raise InvalidArgument("apply_together(loss_scaler, []): expected a scaler.Share for each optimizer.")
    for at, one in enumerate(found):
        if not isinstance(one, Share):
            raise InvalidArgument(
                f"apply_together: entry {at} of the shares is of type {type(one).__name__}: expected a "
                "scaler.Share(optimizer, grads, variables) for each optimizer."
            )
        where = f"apply_together, share {at}"
        masters = one.variables if isinstance(one.variables, MasterWeights) else None
        variables = masters.weights if masters else as_variables(where, one.variables)
        found[at] = one._replace(grads=as_list(where, one.grads), variables=masters or variables)
        try:
            check_optimizer(one.optimizer)
            clipping_of(one.clip_norm, one.clip)
            check_pairs(found[at].grads, variables, allow_16bit_updates=None)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None
        is_earlier = any(one.optimizer is other.optimizer for other in found[:at])
        if is_earlier and hasattr(one.optimizer, "apply"):
            raise InvalidArgument(
                f"{where}: its optimizer is that of an earlier share, and would count the step twice: expected one "
                "share for each optimizer. Give it the gradients and variables of both."
            )
    return found


@contextlib.contextmanager
def _put_back_after_an_error(before: Snapshot) -> Iterator[None]:
    """Puts variables back where an optimizer ends in an error of its own; in eager mode, where others have moved."""
    try:
        yield
    except Exception:
        if tf.executing_eagerly() and replicas.replica_count() == 1:
            _put_back(before, tf.constant(True), selects=False)
        raise


def _moved_by(share: Share) -> list:
    """The variables that a share's optimizer moves, with those of the model that follow its masters."""
    masters = share.variables if isinstance(share.variables, MasterWeights) else None
    if masters is None:
        return list(share.variables)
    # A float32 variable is its own master.
    own = {id(replicas.native(variable)) for variable in masters.weights}
    followers = [variable for variable in masters.model_variables if id(replicas.native(variable)) not in own]
    return [*masters.weights, *followers]


def _among_all(judged: Outcome, outcomes: Sequence[Outcome], counts: Sequence[int]) -> list[Outcome]:
    """The outcomes of the shares, with positions among the variables of all of them.

    A position beyond a share's own variables is one of its optimizer's, which stays as it is.
    """
    found, first = [], 0
    for one, count in zip(outcomes, counts, strict=True):
        places = {name: getattr(one, name) for name in ("index", "nearest")}
        own = tf.reduce_all([place < count for place in places.values()])
        moved = {name: tf.where(own & (place >= 0), place + first, place) for name, place in places.items()}
        found.append(one._replace(**moved, names_from=tf.where(own, judged.names_from, one.names_from)))
        first += count
    return found


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


def _before(shares: Sequence[Share]) -> Snapshot:
    """What some of the optimizers are going to move, as it is now."""
    found: list = []
    for one in shares:
        optimizer = as_called_by_the_gate(one.optimizer)
        masters = one.variables if isinstance(one.variables, MasterWeights) else None
        known = masters.weights if masters else list(one.variables)
        if not without_values(known):
            replicas.merge(lambda strategy, optimizer=optimizer, known=known: build_optimizer(optimizer, known))
        model = (*masters.model_variables, *masters.variables) if masters else ()
        found += [*known, *model, *variables_of(optimizer)]
    variables = {id(replicas.native(variable)): replicas.native(variable) for variable in found}.values()
    return Snapshot(tuple(variables), tuple(map(tf.identity, variables)))


def _put_back(before: Snapshot, failed: tf.Tensor, selects: bool) -> None:
    """Puts variables back where `failed`, scalar bool, is true."""

    def put_back(strategy: tf.distribute.Strategy, failed: tf.Tensor, values: tuple) -> None:
        failed = replicas.any_of(strategy, failed)
        state = list(zip(before.variables, values, strict=True))

        def all_of_them() -> None:
            for variable, value in state:
                replicas.assign_each(strategy, variable, lambda own, value: value, value)

        if selects:
            restore_where(strategy, state, tf.logical_not(failed), tf.constant(True))
        else:
            tf.cond(failed, all_of_them, lambda: None)

    if before.variables:
        replicas.merge(put_back, failed, before.values)


def _unless(outcome: Outcome, failed: tf.Tensor) -> Outcome:
    """The outcome of a share: if another failed it has not moved either."""
    nan = tf.constant(float("nan"))
    return outcome._replace(
        finite=tf.logical_and(outcome.finite, tf.logical_not(failed)),
        clipped_norm=tf.where(failed, nan, outcome.clipped_norm),
    )


def _failing(judged: Outcome, outcomes: Sequence[Outcome], failed: tf.Tensor) -> Outcome:
    """The outcome of the step, with the reason of the first share that failed."""
    found = _unless(judged, failed)
    for one in reversed(outcomes):
        this = tf.logical_and(judged.finite, tf.logical_not(one.finite))
        reason = {
            name: tf.where(this, getattr(one, name), getattr(found, name))
            for name in ("cause", "has_nan", "index", "count", "nearest", "lower_helps", "names_from")
        }
        found = found._replace(**reason)
    return found
