"""Follows the calls of one loss scaler: what is wrong in each, and the scale that gradients carry between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import in_a_branch, tape_records
from scaler.backend.versions import warn_of_slow_float16
from scaler.checks import scale_or_nan
from scaler.errors import InvalidArgument
from scaler.misuse import moving_statistics
from scaler.misuse.carried import (
    Carried,
    carried_in_graph,
    divided_by_another_scale,
    knows_its_loss,
    scale_read,
)
from scaler.misuse.eager import EagerSteps
from scaler.misuse.kept_sums import kept_elsewhere, look_at_end
from scaler.misuse.losses import float16_loss, float16_probabilities_behind, is_computed_slowly, resized_in_xla
from scaler.misuse.marks import LOSS_SCALE, READ, SCALED, mark, marked_retried, of_last_loss, owned
from scaler.misuse.moving_statistics import Moved
from scaler.misuse.open_step import OpenStep, unseen_loss
from scaler.misuse.order_of_calls import Use, one_scale, undivided
from scaler.misuse.trace import trace_here, units_of
from scaler.misuse.units import Mixed, Note, Power, Unit, sources_of
from scaler.misuse.verdicts import (
    NEVER_ASKED,
    NOT_SCALED,
    Verdict,
    counted_otherwise,
    divided_again,
    judge,
    not_scaled,
    refuse_scaled,
    still_scaled,
    without_gradient,
)
from scaler.strategies import NoScaling, Static, Strategy
from scaler.strategies.base import needs_of, only_scale
from scaler.strategies.spike_guard import unguarded

_UNSEEN = "a loss that nobody sees"


class Calls:
    """The calls of one loss scaler. It owns the scales that it marks: another loss scaler refuses their gradients.

    Args:
        strategy: The scaler's strategy.
        stored: The variable that holds the scale of the next loss.
        scale_now: Returns that scale as a step may use it.
        counted: Returns how many steps were counted, scalar float32.

    Attributes:
        use: In which order the scaler was used so far.
        step: What each replica remembers between `scale` and `apply`.
    """

    def __init__(
        self,
        strategy: Strategy,
        stored: tf.Variable,
        scale_now: Callable[[], tf.Tensor],
        counted: Callable[[], tf.Tensor],
    ) -> None:
        self.use, self.step = Use(), OpenStep(needs_of(strategy).loss, counted)
        self._stored, self._scale_now = stored, scale_now
        self._moves = only_scale(strategy) is None
        self._eager = EagerSteps(scale_now if self._moves else None)
        self._has_retried = self._in_a_loss = False
        self._is_constant = isinstance(unguarded(strategy), (NoScaling, Static))
        self.is_one = self._is_constant and bool(tf.get_static_value(tf.equal(strategy.init().loss_scale, 1.0)))

    def check_loss(self, loss: tf.Tensor) -> None:
        """Checks what `scale` is given, a floating-point scalar.

        Raises:
            InvalidArgument: If the loss was scaled already.
        """
        refuse_scaled(loss)
        half = float16_loss(loss)
        self.use.say_once(half and f"scale(loss): {half}")
        self.use.say_once(float16_probabilities_behind(loss))
        self.use.say_once(resized_in_xla(loss))
        if is_computed_slowly(loss):
            warn_of_slow_float16()

    def scales(self, loss: tf.Tensor) -> tf.Tensor:
        """Records that a loss is scaled, in float32, and returns the scale that multiplies it."""
        self.use.scales()
        if self._eager.broke_off():
            self.step.end(tf.constant(True))
        loss_scale, finite = owned(self._scale_now(), LOSS_SCALE, self), tf.math.is_finite(loss)
        if self._in_a_loss:
            # A penalty may be infinite because its gradients overflowed. Bad data shows in the loss that they are of.
            finite, self._in_a_loss = tf.logical_or(finite, self.step.loss_finite), False
        self.step.begin(loss, finite, knows_its_loss(loss_scale, finite, loss))
        self._eager.scales(loss_scale, finite)
        return loss_scale

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """Marks a loss that was multiplied by what `scales` returned, and returns it."""
        return mark(loss if self.is_one else self._eager.scaled(loss), SCALED)

    def scales_by_hand(self) -> tf.Tensor:
        """Records that the user reads the scale to multiply a loss by it, and returns it."""
        self.use.scales_by_hand()
        self._in_a_loss = True
        now = self._scale_now()
        opened = self.step.begin_by_hand(now)
        self._eager.scales(opened, tf.constant(True))
        self._eager.differentiated()
        # An open step of a foreign checkpoint may have had another scale, which `apply` would not divide by.
        return owned(opened if self._moves else now, LOSS_SCALE, self)

    def reads(self) -> tf.Tensor:
        """Records that the user reads the scale outside a tape, and returns it."""
        self.use.was_read(self.step, self._scale_now)
        return owned(self._scale_now(), READ, self)

    def asks(self) -> tf.Tensor:
        """Records that the user asks for the scale that gradients carry, and returns it."""
        self.use.asked, self._in_a_loss = True, self._in_a_loss or tape_records()
        return of_last_loss(owned(self._last_scale(), LOSS_SCALE, self))

    def unscales(
        self, grads: Sequence[gradients.Gradient], model: Sequence = (), named: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Checks what `unscale` is given, and returns the scale that it carries.

        Args:
            grads: The gradients.
            model: The model's variable of each, if they are known.
            named: The scale that the gradients carry, if the user names it.

        Raises:
            InvalidArgument: If the gradients are unscaled already, or do not carry one scale of this scaler.
        """
        verdict, trace = self._judged("unscale", grads, model, named), trace_here()
        if model and verdict is not None:
            self.use.say_once(verdict.sentence, verdict.mistake)
        elif trace is not None:
            trace.unscaled.append((self, grads))
        not_scaled = self._eager.not_scaled("unscale", grads)
        self.use.begins()
        if named is not None:
            return scale_or_nan(named)
        self.use.say_once(not_scaled, NOT_SCALED)
        self.use.check_one_scale("unscale", self.step, self._scale_now)
        loss_scale = self.carried("unscale", grads).loss_scale
        # A second backward pass through the division divides by it, too.
        return loss_scale if self._moves else owned(loss_scale, LOSS_SCALE, self)

    def unscaled(self, grads: Sequence[gradients.Gradient], result: Sequence[gradients.Gradient]) -> None:
        """Records what `unscale` made of gradients. Where a tape records, a loss is computed from them."""
        self._in_a_loss = tape_records()
        self._eager.takes(grads)
        self.use.unscales(grads, result)

    def applies(
        self,
        grads: Sequence[gradients.Gradient],
        targets: Sequence,
        model: Sequence,
        *,
        unscaled: bool | tf.Tensor,
        when: bool | tf.Tensor,
        ends: bool,
        reaches_all: bool,
        rolls_back: bool,
        loss_scale: tf.Tensor | None,
    ) -> tuple[Carried, list[Moved]]:
        """Checks what `apply` is given.

        Args:
            grads: A gradient or None for each variable.
            targets: The variables that the optimizer updates.
            model: Those of the model, which are others if the targets are masters.
            unscaled: Scalar bool, whether the gradients are unscaled already.
            when: Scalar bool, whether they are applied at all.
            ends: Whether the call counts the step.
            reaches_all: Whether the loss is meant to reach all variables.
            rolls_back: Whether the user rolls back what the forward pass moved.
            loss_scale: The scale that the gradients carry, if the user names it.

        Returns:
            What the gradients carry of their losses, and the moved statistics of BatchNorm to roll back.

        Raises:
            InvalidArgument: If one scale of this scaler cannot unscale the gradients, or it is not known which.
        """
        moving_statistics.begins()
        nobody_scaled = self._check_scales(grads, model, unscaled, when, loss_scale)
        self.use.begins()
        if ends:
            self.use.ends()
        self.use.leaves_count |= not ends
        if reaches_all and not self.use.unconnected_are_named:
            self.use.say_once(without_gradient(grads, model))
        moved = [] if rolls_back else self._moved(grads, model, when)
        if loss_scale is None:
            carried = self.carried(
                "apply",
                grads,
                targets,
                may_be_unscaled=unscaled is not False,
                always=when is True,
                nobody_scaled=nobody_scaled,
            )
        else:
            carried = self.named(loss_scale)
        if when is True:
            self.use.say_once(counted_otherwise(grads, model, carried.loss_scale, ends))
        self._eager.takes(grads, targets)
        return carried, moved

    def undivided(
        self, grads: Sequence[gradients.Gradient], targets: Sequence, unscaled: bool | tf.Tensor
    ) -> list[gradients.Gradient]:
        """The gradients, with new values as they were before `unscale`: see `order_of_calls.undivided`."""
        return undivided(grads, targets, unscaled, self.use)

    def retries(
        self, grads: Sequence[gradients.Gradient], carried: Carried, loss_scale: tf.Tensor, found: Sequence
    ) -> tuple[list, tf.Tensor]:
        """Records that gradients were taken again, and lets those that were found carry their own scale.

        Args:
            grads: The gradients before.
            carried: What they carried.
            loss_scale: What those that were found carry, scalar float32.
            found: The gradients now.

        Returns:
            The gradients found, and their scale, as marked tensors.
        """
        if not self._moves:
            return list(found), loss_scale
        self._has_retried = True
        loss_scale = owned(loss_scale, LOSS_SCALE, self)
        self.step.retried(carried.loss_scale, loss_scale)
        self._eager.retries(grads, carried.loss_scale, loss_scale)
        return marked_retried(found, knows_its_loss(loss_scale, carried.loss_finite), self), loss_scale

    def decided(self, apart: tf.Tensor | None) -> None:
        """Records that `apply` decided about its step; `apart`, scalar bool, whether it left the count to others."""
        if apart is not None:
            self.step.end(apart)
        if not tf.executing_eagerly():
            moving_statistics.decided()

    def updates(self, finite: tf.Tensor) -> None:
        """Checks a call of `update`, and records the end of its step."""
        self.use.check_open(self.step)
        self.use.ends()
        self._eager.ends(finite)

    def warn_of_unseen_loss(self, step: str) -> None:
        """Warns once that a step was applied though its loss was not finite.

        Args:
            step: Which one, as the beginning of a sentence.
        """
        self.use.say_once(unseen_loss(step), _UNSEEN)

    def carried(
        self,
        method: str,
        grads: Sequence[gradients.Gradient],
        variables: Sequence | None = None,
        *,
        may_be_unscaled: bool = False,
        always: bool = True,
        nobody_scaled: bool = False,
    ) -> Carried:
        """The scale that gradients carry, and whether their losses were finite.

        Args:
            method: Who asks, for an error.
            grads: The gradients.
            variables: What they are applied to, if it is known.
            may_be_unscaled: Whether they may be unscaled already, so that no scale has to be found.
            always: Whether every call of the step that is traced takes them.
            nobody_scaled: Whether their loss is known not to have been scaled.

        Raises:
            InvalidArgument: If they carry more than one scale, or which one they carry cannot be known.
        """
        values = [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]
        divides, known, in_doubt, is_kept = self._moves and not may_be_unscaled, None, False, False
        if not tf.executing_eagerly():
            # Most gradients of a step have the same unit.
            units = list(dict.fromkeys(units_of(values)))
            sources, now = sources_of(units), self._stored
            read, in_doubt = scale_read(method, values, sources, self, self.use.read, now, self._scale_now)
            if read is not None:
                return Carried(read, tf.logical_or(self.step.decided, self.step.loss_finite))
            # What a variable or another memory kept from an earlier call may be in a gradient of any other unit.
            is_kept = divides and not all(isinstance(one, Power) and Note.DOUBTFUL not in one.notes for one in units)
            if is_kept:
                self.use.say_once(kept_elsewhere(method, units), "kept elsewhere")
            if divides:
                used, retried = self.step.variable, self._has_retried
                known = carried_in_graph(method, units, sources, self, now, used, retried, nobody_scaled)
            if is_kept:
                look_at_end(
                    method, values, units, variables or (), self, always, now, self.step.variable, self.use.say_once
                )
        elif divides:
            known = self._eager.carried(method, grads, variables, self.step.used, self)
        if known is not None:
            finite = self.step.loss_finite if known.loss_finite is None else known.loss_finite
            # The step may sum up losses of other calls. Else `step.loss` has more only if a step broke off before it.
            sums_up = is_kept or not always or self.step.losses > 1
            return Carried(known.loss_scale, finite, None if sums_up else known.loss)
        carried = self._last_scale()
        if in_doubt and not may_be_unscaled:
            carried = one_scale(self.step.decided, carried, self._scale_now())
        return Carried(tf.identity(carried), self.step.loss_finite)

    def named(self, loss_scale: tf.Tensor) -> Carried:
        """What gradients carry whose scale the user names, of the losses that were scaled last."""
        return Carried(scale_or_nan(loss_scale), self.step.loss_finite)

    def _last_scale(self) -> tf.Tensor:
        now = self._scale_now()
        return self.step.scale_of_gradients(now) if self._moves else now

    def _check_scales(self, grads: Sequence, model: Sequence, unscaled: Any, when: Any, named: Any) -> bool:
        """Refuses gradients that this scaler's scale does not divide, and warns of those that seem to carry none.

        Returns:
            Whether their loss is known not to have been scaled.
        """
        if unscaled is True and not self._is_constant:
            judged, wanted = self._units(grads, model)
            self.use.say_once(still_scaled(judged, wanted) or divided_again(judged, self))
            if self._moves and not tf.executing_eagerly():
                units = units_of([gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)])
                self.use.say_once(divided_by_another_scale(units, self, self._stored), "another scale divides")
        if unscaled is not False:
            self._say_of_unscaled(model)
            return False
        # One scaler may take what its own branch gave, and another one the rest.
        verdict = self._judged("apply", grads, model, named, may_leave_out=when is not True or in_a_branch())
        self.use.check_one_scale("apply", self.step, self._scale_now)
        if not self.is_one:
            if not self.use.asked:
                self.use.say_once(f"apply(grads): {not_scaled(NEVER_ASKED)}", NOT_SCALED)
            elif verdict is not None:
                self.use.say_once(verdict.sentence, verdict.mistake)
            if named is None:
                self.use.say_once(self._eager.not_scaled("apply", grads), NOT_SCALED)
            self.use.check_unscaled(grads)
        return not self.use.asked or (verdict is not None and verdict.mistake == NOT_SCALED)

    def _say_of_unscaled(self, model: Sequence) -> None:
        """Warns of gradients that `unscale` was given in this trace, now that the model's variables are known."""
        trace = trace_here()
        for owner, grads in trace.unscaled if trace is not None and not self.is_one else ():
            verdict = self._verdict("unscale", grads, model) if owner is self else None
            if verdict is not None and not verdict.refuses:
                self.use.say_once(verdict.sentence, verdict.mistake)

    def _judged(
        self, method: str, grads: Sequence, model: Sequence, named: Any = None, may_leave_out: bool = False
    ) -> Verdict | None:
        """What is wrong with gradients that the scale is to divide, if that does not refuse them."""
        # A scale of 1 may divide gradients that another scaler scaled and the user unscaled.
        verdict = None if self.is_one else self._verdict(method, grads, model, named, may_leave_out)
        if verdict is not None and verdict.refuses:
            raise InvalidArgument(verdict.sentence)
        return verdict

    def _verdict(
        self, method: str, grads: Sequence, model: Sequence, named: Any = None, may_leave_out: bool = False
    ) -> Verdict | None:
        units, wanted = self._units(grads, model, named)
        return judge(method, units, self, wanted, self._moves, may_leave_out)

    def _units(self, grads: Sequence, model: Sequence, named: Any = None) -> tuple[list[Unit], frozenset]:
        """The units of gradients, and the powers of the scale that divides them."""
        # The "gradient" of some variables is their new value.
        derivatives = gradients.derivatives(grads, model) if len(model) == len(grads) else grads
        judged = [gradients.values_of(grad) for grad in derivatives if tf.is_tensor(grad)]
        units = units_of(judged if named is None else [*judged, named], model)
        scale: Unit = Power(frozenset([(self, 1.0)])) if named is None else units.pop()
        if isinstance(scale, Power) and scale.powers:
            return units, scale.powers
        # What divides them is not known, so that nothing but their mixture is.
        return [unit for unit in units if isinstance(unit, Mixed)], frozenset()

    def _moved(self, grads: Sequence, model: Sequence, when: Any) -> list[Moved]:
        """BatchNorm's statistics that moved in this graph and can be put back. It warns if some cannot be."""
        known = when if isinstance(when, bool) else None
        moved, missing = moving_statistics.before_apply(model, grads, self, known)
        if missing and not self.use.statistics_are_kept:
            self.use.say_once(moving_statistics.sentence(missing))
        return moved
