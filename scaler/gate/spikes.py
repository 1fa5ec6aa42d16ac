"""What a `SpikeGuard` says of the steps of a loss scaler, where the scaler has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from scaler.backend.variables import choose
from scaler.errors import InvalidArgument
from scaler.gate.state import StoredState
from scaler.gate.targets import Targets
from scaler.gradients.clipping import Clipping, ScaleEach
from scaler.outcome.outcome import Cause, Outcome, as_spike
from scaler.strategies.base import Strategy
from scaler.strategies.spike_guard import Verdict, guard_of


@dataclasses.dataclass(frozen=True)
class Judged:
    """What a guard says of one step.

    Attributes:
        verdict: Whether it is a spike.
        norm: Float32, the global norm that was judged.
        norms: Float32 [remembered variables], that of each gradient; None if none is watched.
        clip: How its gradients are limited, or None.
        clipped: Int64, how many of them are clipped to limits of their own; None if none ever is.
        positions: For each remembered variable its position among those of the step, -1 if it is none of them.
    """

    verdict: Verdict
    norm: tf.Tensor
    norms: tf.Tensor | None
    clip: Clipping | None
    clipped: tf.Tensor | None
    positions: Sequence[int]

    def refine_reason(self, targets: Targets, reason: tf.Tensor, spike: tf.Tensor, squares: tf.Tensor) -> tf.Tensor:
        """The reason for a skip, float32 [6], corrected where the step is a spike.

        Args:
            targets: What the step was to move.
            reason: Why the step was skipped, judging by gradients and optimizer.
            spike: Scalar bool.
            squares: The squared norm of each gradient, by which the largest is known.
        """
        verdict = self.verdict
        largest = tf.gather(tf.constant(targets.positions, tf.int64), tf.argmax(squares))
        where = largest
        if verdict.tensor is not None:
            own = tf.gather(tf.constant(self.positions, tf.int64), tf.maximum(verdict.tensor, 0))
            where = choose(verdict.tensor < 0, largest, own)
        return as_spike(reason, spike, verdict.of_norm, where, verdict.beyond)

    def spike_report(self, spike: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The value, the median and the limit of a spike, float32; 0 where the step is none."""
        verdict = self.verdict
        return tuple(choose(spike, one, 0.0) for one in (verdict.value, verdict.usual, verdict.limit))


class Spikes:
    """The guard of a scaler, with the variables that hold its state. Without a guard it says nothing.

    Args:
        strategy: The scaler's.
        stored: Its state.
    """

    def __init__(self, strategy: Strategy, stored: StoredState) -> None:
        self._guard, self._stored = guard_of(strategy), stored
        self._places: dict[tuple, int] = {}

    def __bool__(self) -> bool:
        """Whether there is a guard."""
        return self._guard is not None

    @property
    def by_tensor(self) -> str | None:
        """What happens to a step with one gradient beyond its own limit, as of `SpikeGuard`."""
        return self._guard.by_tensor if self._guard else None

    def bind(self, variables: Sequence) -> None:
        """Remembers the variables of the first step, if each gradient's norm is watched. Called once for all replicas.

        Args:
            variables: Those that the step may move, float32 or float64.

        Raises:
            InvalidArgument: If the step moves a variable that the first one did not, or some of several that nothing
                tells apart.
        """
        if not self.by_tensor:
            return
        keys = _keys(variables)
        if not self._places:
            self._stored.remember_tensors(len(keys))
            self._places = {key: place for place, key in enumerate(keys)}
        for name, *_ in (key for key in keys if key not in self._places):
            raise InvalidArgument(
                f"apply: SpikeGuard(by_tensor={self.by_tensor!r}) remembers the last norms of {len(self._places)} "
                f"variables, those of the first step, and {name!r} is none of them: expected the same variables at "
                "every step, or some of them. Make a new LossScaler for others."
            )
        alike = [key[:2] for key in self._places]
        for name, shape, _ in keys:
            if alike.count((name, shape)) != sum(key[:2] == (name, shape) for key in keys):
                raise InvalidArgument(
                    f"apply: SpikeGuard(by_tensor={self.by_tensor!r}) knows variables by name and shape, and this step "
                    f"has only some of those named {name!r} of shape {shape}: expected all of them, or a name for each."
                )

    def judge(
        self,
        targets: Targets,
        squares: tf.Tensor,
        norm: tf.Tensor,
        loss: tf.Tensor | None,
        clip: Clipping | None,
    ) -> Judged | None:
        """What the guard says of a step; None without one. Called once for all replicas, after `bind`.

        Args:
            targets: What the step moves.
            squares: The squared norm of each unscaled gradient, float32 or float64 [gradients], if each is watched.
            norm: Float32, the global norm.
            loss: Float32, of all replicas; None if it is not watched.
            clip: How the gradients are limited, or None.
        """
        guard, state = self._guard, self._stored.now()
        if guard is None:
            return None
        if not guard.by_tensor:
            return Judged(guard.verdict(state, norm, loss), norm, None, clip, None, ())
        known = _keys(targets.built_for)
        places = [self._places[known[position]] for position in targets.positions]
        where = dict(zip(places, targets.positions, strict=True))
        exact = _spread(tf.sqrt(squares), places, len(self._places))
        norms = tf.cast(exact, tf.float32)
        clipped = None
        if guard.by_tensor == "clip":
            factors = _picked(guard.factors(state, exact), places)
            clipped = tf.math.count_nonzero(factors < 1.0)
            clip = ScaleEach(factors, clip)
            norm = tf.cast(tf.sqrt(tf.reduce_sum(clip.scaled(squares))), tf.float32)
        verdict = guard.verdict(state, norm, loss, norms)
        return Judged(verdict, norm, norms, clip, clipped, [where.get(at, -1) for at in range(len(self._places))])

    def check_optimizers(self, count: int) -> None:
        """Refuses to limit the gradients of several optimizers."""
        if self.by_tensor == "clip" and count > 1:
            raise InvalidArgument(
                'apply_together with SpikeGuard(by_tensor="clip"): it limits the gradients of one optimizer, and here '
                f'are {count}. Expected by_tensor="skip" or None.'
            )

    def check_whole_step(self, update: bool) -> None:
        """Refuses an `apply` that is only a part of a step."""
        if self._guard and not update:
            raise InvalidArgument(
                "apply(update=False) with a SpikeGuard: the guard judges a whole step by its norm and its loss, and "
                "here several calls are one step. Expected one apply for all variables, or a strategy without the "
                "guard."
            )

    def limits(self) -> dict[str, tf.Tensor]:
        """What the next step's norm and loss may be, scalar float32, by the names "norm_limit" and "loss_limit"."""
        names = ["_".join((name, "limit")) for name in self._guard.watched] if self._guard else []
        return {name: self._stored.field(name) for name in names}

    def told(self, last_skip: Outcome) -> Outcome:
        """The outcome of the last skip, with the numbers of a spike."""
        if not self._guard:
            return last_skip
        spike = tf.equal(last_skip.cause, int(Cause.SPIKE))
        value, usual, limit = tf.unstack(choose(spike, self._stored.field("last_spike"), 0.0))
        return last_skip._replace(value=value, usual=usual, limit=limit)

    def too_many(self, consecutive_skips: int) -> str | None:
        """What is wrong if more steps in a row were spikes than may be, as the beginning of a sentence."""
        if not self._guard or not consecutive_skips:
            return None
        spikes = int(self._stored.field("spikes_in_a_row"))
        most = self._guard.most_in_a_row
        if spikes <= most:
            return None
        guard = self._guard
        limits = {"factor": guard.norm or guard.loss or guard.by_tensor, "largest_norm": guard.largest_norm is not None}
        larger = " or ".join([*(name for name, used in limits.items() if used), "share"])
        return (
            f"{spikes} steps in a row were skipped as spikes, and {most} are allowed. This is another level and no "
            f"spike: go back to an earlier checkpoint if the run has diverged, else use a larger {larger}"
        )


def _keys(variables: Sequence) -> list[tuple]:
    """What variables are known by: name, shape, and the how many-th of these it is."""
    keys: list[tuple] = []
    for variable in variables:
        alike = (getattr(variable, "path", variable.name), tuple(variable.shape))
        keys.append((*alike, sum(key[:2] == alike for key in keys)))
    return keys


def _spread(norms: tf.Tensor, places: Sequence[int], count: int) -> tf.Tensor:
    """Norms at their places among `count`, NaN elsewhere."""
    if list(places) == list(range(count)):
        return norms
    own = dict(zip(places, tf.unstack(norms, num=len(places)), strict=True))
    nothing = tf.constant(float("nan"), norms.dtype)
    return tf.stack([own.get(place, nothing) for place in range(count)])


def _picked(values: tf.Tensor, places: Sequence[int]) -> tf.Tensor:
    """The values at these places."""
    if list(places) == list(range(values.shape[0])):
        return values
    each = tf.unstack(values)
    return tf.stack([each[place] for place in places])
