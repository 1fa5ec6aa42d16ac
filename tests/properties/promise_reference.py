"""What a step must do, written a second time from the promise: float64 numbers with bounds on every rounding.

A bound is derived, not tuned: an operation in a format with unit roundoff u changes a result r by at most u |r|, plus
the least positive number where it underflows; sums of n terms change by n u times the sum of their magnitudes.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

SINGLE = 2.0**-24
TINY = 2.0**-126
LARGEST_SINGLE = float(np.finfo(np.float32).max)


class Kind(NamedTuple):
    """A format that a model computes in."""

    roundoff: float
    least: float
    largest: float


KINDS = {
    "float16": Kind(2.0**-11, 2.0**-24, 65504.0),
    "float32": Kind(SINGLE, TINY, LARGEST_SINGLE),
}


class Bounded(NamedTuple):
    """Numbers and how far rounding may have moved each of them."""

    value: np.ndarray
    error: np.ndarray

    @property
    def most(self):
        """The largest magnitude this can have."""
        return np.abs(self.value) + self.error

    def check(self, got, what):
        """Requires that `got` is one of the numbers this can be."""
        distance = np.abs(np.asarray(got, np.float64) - self.value)
        assert (distance <= self.error).all(), f"{what}: {got} is {distance} from {self.value}, allowed {self.error}"


class Micro(NamedTuple):
    """A micro-batch: unscaled gradients of its share of the loss, the layer's outputs, and whether all was finite.

    `finite` is None where rounding decides.
    """

    kernel: Bounded
    bias: Bounded
    output: Bounded
    finite: bool | None


def micro_batch(kernel, bias, x, y, importance, scale, share, kind):
    """The mean of `importance (x kernel + bias - y)^2`, times `scale` and `share`, differentiated in `kind`."""
    u, least, largest = KINDS[kind]
    count, width = x.shape[0], kernel.shape[1]
    with np.errstate(all="ignore"):
        x, y, importance = (np.asarray(value, np.float64) for value in (x, y, importance))
        kernel, bias = np.asarray(kernel, np.float64), np.asarray(bias, np.float64)
        terms = np.abs(x) @ np.abs(kernel) + np.abs(bias)
        # As many products as inputs, as many sums, and two roundings more where the format changes.
        output = Bounded(x @ kernel + bias, (2 * x.shape[1] + 2) * (u * terms + least))
        slope = 2.0 * importance[:, None] / (count * width) * scale * share
        residual = Bounded(output.value - y, output.error + 2 * SINGLE * (output.most + np.abs(y)))
        backward = Bounded(slope * residual.value, np.abs(slope) * residual.error)
        backward = Bounded(backward.value, backward.error + (u + 8 * SINGLE) * backward.most + least)
        sums = np.abs(x).T @ backward.most, backward.most.sum(axis=0)
        errors = np.abs(x).T @ backward.error, backward.error.sum(axis=0)
        grads = [
            Bounded(value, error + (2 * count + 2) * (u * total + least))
            for value, error, total in zip(
                (x.T @ backward.value, backward.value.sum(axis=0)), errors, sums, strict=True
            )
        ]
        # The product is rounded before the bias is added, which may cancel what overflowed.
        biggest = [terms, output.most, backward.most, *sums, np.abs(slope), np.abs(x)]
        sure = all(np.isfinite(value).all() and (value < 0.99 * largest).all() for value in biggest)
        broken = [(np.abs(value) - error > 1.01 * largest).any() for value, error in (backward, *grads)]
        unknown = [np.isnan(value).any() or np.isinf(value).any() for value, _ in (backward, *grads)]
        finite = True if sure else False if any(broken) or any(unknown) else None
        return Micro(*(Bounded(value / scale, error / scale + TINY) for value, error in grads), output, finite)


def plus(total, more):
    """The sum of two numbers in float32."""
    value = total.value + more.value
    return Bounded(value, total.error + more.error + SINGLE * (total.most + more.most) + TINY)


def norm_is_finite(grads):
    """Whether the squared global norm fits float32; None where rounding decides."""
    with np.errstate(all="ignore"):
        high = sum(np.sum(grad.most**2) for grad in grads)
        low = sum(np.sum(np.maximum(np.abs(grad.value) - grad.error, 0.0) ** 2) for grad in grads)
    return True if high < 0.99 * LARGEST_SINGLE else False if low > 1.01 * LARGEST_SINGLE else None


def clipped(grads, limit):
    """The gradients scaled down to a global norm of `limit` where theirs is larger."""
    norm = np.sqrt(sum(np.sum(grad.value**2) for grad in grads))
    slack = np.sqrt(sum(np.sum(grad.error**2) for grad in grads)) + 32 * SINGLE * norm
    factors = [min(1.0, limit / max(n, TINY)) for n in (norm, norm + slack, max(norm - slack, 0.0))]
    wide = max(factors) - min(factors) + 4 * SINGLE
    return [Bounded(g.value * factors[0], g.error * max(factors) + g.most * wide + TINY) for g in grads]


def momentum_step(weight, slot, grad, rate, momentum):
    """The slot and the weight after a step of descent with momentum, in float32."""
    pull = Bounded(rate * grad.value, rate * grad.error)
    value = momentum * slot - pull.value
    sizes = np.abs(momentum * slot) + pull.most
    after = Bounded(value, pull.error + 4 * SINGLE * sizes + 4 * TINY)
    moved = weight + value
    return after, Bounded(moved, after.error + 2 * SINGLE * (np.abs(weight) + after.most) + TINY)


def adam_step(weight, first, second, grad, rate, number, *, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """The slots and the weight after Adam's step number `number`, from 1, in float32."""
    square = Bounded(grad.value**2, 2 * np.abs(grad.value) * grad.error + grad.error**2)
    # Kingma and Ba 2015, algorithm 1 with the bias correction in the step size. The decay rates are themselves rounded
    # to float32, and 1 - 0.999 then keeps 14 bits: 2^-24 / 0.001.
    after = []
    for slot, new, beta in ((first, grad, beta_1), (second, square, beta_2)):
        value = beta * slot + (1 - beta) * new.value
        loss = SINGLE / (1 - beta)
        sizes = np.abs(slot) * (4 * SINGLE) + (1 - beta) * new.most * (4 * SINGLE + loss)
        after.append(Bounded(value, (1 - beta) * new.error + sizes + 4 * TINY))
    m, v = after
    size = rate * np.sqrt(1 - beta_2**number) / (1 - beta_1**number)
    # Powers and differences of the rounded decay rates.
    doubt = 8 * SINGLE * (1 + number / (1 - beta_2**number) + number / (1 - beta_1**number))
    corners = [
        (m.value + way * m.error) / (np.sqrt(np.maximum(v.value + up * v.error, 0.0)) + epsilon)
        for way in (-1, 1)
        for up in (-1, 1)
    ]
    step = m.value / (np.sqrt(v.value) + epsilon)
    wide = np.max([np.abs(corner - step) for corner in corners], axis=0)
    error = size * (wide + doubt * (np.abs(step) + wide))
    moved = weight - size * step
    return m, v, Bounded(moved, error + 2 * SINGLE * (np.abs(weight) + np.abs(size * step)) + TINY)


def master_before(master, variable):
    """The master that a step starts from: the model's value where that is no rounding of the master."""
    same = rounded(master, variable.dtype) == variable
    return np.where(same, master, variable.astype(np.float32))


def rounded(master, dtype):
    """The model's value for a master: rounded, and the largest finite value beyond it."""
    largest = np.finfo(dtype).max
    with np.errstate(over="ignore"):
        return np.clip(np.asarray(master).astype(dtype), -largest, largest)


@dataclasses.dataclass
class Scale:
    """The scale and the counters, moved by the rules of the promise."""

    scale: float
    low: float
    high: float
    hysteresis: int
    good: int = 0
    bad: int = 0
    attempted: int = 0
    applied: int = 0
    row: int = 0

    def step(self, finite, interval, loss_finite=True):
        """After an attempted step: grows on the interval-th good one in a row, backs off when the patience is over.

        One that was skipped with a loss that is not finite is counted, and moves nothing else.
        """
        self.attempted += 1
        if not finite and not loss_finite:
            self.row += 1
        elif finite:
            self.applied, self.row, self.good = self.applied + 1, 0, self.good + 1
            if self.good >= interval:
                self.scale, self.good, self.bad = min(2 * self.scale, self.high), 0, 0
        else:
            self.row, self.good, self.bad = self.row + 1, 0, self.bad + 1
            if self.bad >= self.hysteresis:
                self.scale = max(self.scale / 2, self.low)
