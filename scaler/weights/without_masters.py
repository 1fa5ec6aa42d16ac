"""Ways to train 16-bit weights without float32 masters: updates rounded at random, or with their rounding error kept.

Rounded to nearest, an update smaller than half the distance between two neighbours leaves a weight as it was, however
often it is repeated. Rounding at random keeps it on average; compensated (Kahan) summation keeps it in a second 16-bit
number. For bfloat16 either comes close to float32 weights; neither widens the range of float16.

Both are of Zamirai et al. 2020, Revisiting BFloat16 Training (https://arxiv.org/abs/2010.06192): algorithm 1 is
`StochasticRounding`, algorithm 2 is Kahan summation, `KahanWeights`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from scaler.backend import bits, replicas
from scaler.backend.formats import float_format
from scaler.errors import InvalidArgument
from scaler.weights.masters import MasterWeights

_FORMATS = {dtype: float_format(dtype) for dtype in (tf.bfloat16, tf.float16)}


class WithoutMasters(MasterWeights):
    """What both modes share: float32 `weights`, in which an update is computed, and which keep nothing between steps.

    Before an update they become the 16-bit weights, after it they are rounded into them. The optimizer's slots, which
    have their dtype, are float32.
    """

    compiles = False

    def __init__(self, variables: Sequence, name: str):
        super().__init__(variables, name)
        with tf.init_scope():
            self._wanted = [_next_to(master, tf.zeros([], tf.int64), "wanted") for _, master in self._copies()]
            self._lost = [_next_to(master, tf.zeros([], tf.int64), "lost") for _, master in self._copies()]

    @property
    def swallowed(self) -> tf.Tensor:
        """The share of the last applied step's non-zero updates that did not change their 16-bit weight.

        Scalar float32; 0 before the first step. `float32` variables swallow nothing that counts here.
        """
        if not self._lost:
            return tf.constant(0.0)
        lost, wanted = (tf.add_n([tf.identity(count) for count in counts]) for counts in (self._lost, self._wanted))
        return tf.cast(lost / tf.maximum(wanted, 1), tf.float32)

    def _refreshed(self, master: tf.Variable, variable: tf.Variable) -> tf.Tensor:
        return tf.cast(variable, tf.float32)

    def _write(self, weights: Sequence | None, function: Callable[..., Sequence], *others: Sequence) -> None:
        """Assigns `function(position, old, master, *others)`, new values for each variable and those beside it."""
        wanted = {id(master) for _, master in self._copies(weights)}
        rows = zip(self._copies(), self._wanted, self._lost, *others, strict=True)
        for position, ((variable, master), *beside) in enumerate(rows):
            if id(master) in wanted:
                assign = functools.partial(_assign, functools.partial(function, position))
                tf.distribute.get_strategy().extended.update(variable, assign, args=(master, *beside), group=False)
        self.in_update = False


def _assign(
    function: Callable[..., Sequence],
    own: tf.Variable,
    master: tf.Variable,
    wanted: tf.Variable,
    lost: tf.Variable,
    *others: tf.Variable,
) -> None:
    """Assigns new values to a 16-bit variable and those beside it, and counts the updates and those that are lost."""
    old, moved = tf.identity(own), tf.identity(master)
    new, *kept = function(old, moved, *map(tf.identity, others))
    changing = tf.not_equal(moved, tf.cast(old, tf.float32))
    wanted.assign(tf.math.count_nonzero(changing))
    lost.assign(tf.math.count_nonzero(tf.logical_and(changing, tf.equal(old, new))))
    for variable, value in zip((own, *others), (new, *kept), strict=True):
        variable.assign(value)


def _next_to(master: tf.Variable, value: tf.Tensor, name: str) -> tf.Variable:
    """A variable with a component on each replica that `master` has one on."""
    distributed = isinstance(master, tf.distribute.DistributedValues)
    with master.distribute_strategy.scope() if distributed else contextlib.nullcontext():
        return tf.Variable(value, trainable=False, name=name)


class StochasticRounding(WithoutMasters):
    """Rounds updated 16-bit weights up or down at random, so that small updates count on average.

        new = (w + update), rounded up with probability (distance to the neighbour below) / (spacing)

    Pass it in place of the variables: `loss_scaler.apply(optimizer, grads,
    scaler.weights.StochasticRounding(variables))`. Save it with the model: it counts applied steps, and the numbers
    it draws depend only on `seed`, the variable's position and that count. So a restored run draws the same ones.

    During an update each weight is held in float32, in `weights`: only the arithmetic differs from masters. It
    needs as much memory as `MasterWeights`.

    Args:
        variables: The model's trainable variables: float16, bfloat16, or float32, which are updated as they are.
        seed: An integer in [0, 2^31).

    Attributes:
        seed: As it was given.

    Raises:
        InvalidArgument: As for `MasterWeights`, and for another seed.
    """

    def __init__(self, variables: Sequence, seed: int = 0, name: str = "stochastic_rounding"):
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
            raise InvalidArgument(f"StochasticRounding(seed={seed!r}): expected an integer in [0, 2^31).")
        super().__init__(variables, name)
        self.seed = seed
        with tf.init_scope():
            self._steps = _next_to(self.weights[0], tf.zeros([], tf.int64), "steps")

    def write(self, weights: Sequence | None = None) -> None:
        """Rounds the updated weights into the model's variables."""
        replicas.assign_each(tf.distribute.get_strategy(), self._steps, lambda own: own + tf.constant(1, tf.int64))
        count = tf.identity(self._steps)

        def rounded(position: int, old: tf.Tensor, moved: tf.Tensor) -> tuple[tf.Tensor]:
            seed = tf.stack([tf.constant(self.seed + position * 2**31, tf.int64), count])
            return (round_stochastically(moved, old.dtype, seed),)

        self._write(weights, rounded)


class KahanWeights(WithoutMasters):
    """Keeps what rounding takes from 16-bit weights in a second 16-bit number for each, and adds it to the next update.

        y = update - c;  new = round(w + y);  c = round((new - w) - y)

    Pass it in place of the variables: `loss_scaler.apply(optimizer, grads, scaler.weights.KahanWeights(variables))`.
    Save it with the model: it holds the compensations c. One that is larger than the distance between two neighbours
    of its weight does not belong to it, as after `set_weights` or at the dtype's largest value, and counts as 0.

    During an update each weight is held in float32, in `weights`: only the arithmetic differs from masters. It
    needs more memory than `MasterWeights`.

    Args:
        variables: The model's trainable variables: float16, bfloat16, or float32, which are updated as they are.

    Raises:
        InvalidArgument: As for `MasterWeights`.
    """

    def __init__(self, variables: Sequence, name: str = "kahan_weights"):
        super().__init__(variables, name)
        with tf.init_scope():
            zeros = [(master, tf.zeros(master.shape, variable.dtype)) for variable, master in self._copies()]
            self._compensations = [_next_to(master, zero, "compensation") for master, zero in zeros]

    @property
    def compensations(self) -> list:
        """One for each 16-bit variable, of its dtype and shape: by how much the variable is too large."""
        return list(self._compensations)

    def write(self, weights: Sequence | None = None) -> None:
        """Rounds the updated weights into the model's variables, and keeps what that takes away."""
        self._write(weights, _compensated, self._compensations)


def _compensated(position: int, old: tf.Tensor, moved: tf.Tensor, compensation: tf.Tensor) -> tuple:
    del position
    update = moved - tf.cast(old, tf.float32)
    own = tf.abs(tf.cast(compensation, tf.float32)) <= _spacing(tf.cast(old, tf.float32), old.dtype)
    return add_compensated(old, tf.where(own, compensation, tf.zeros_like(compensation)), update)


def round_stochastically(values: tf.Tensor, dtype: str | tf.DType | np.dtype | type, seed: tf.Tensor) -> tf.Tensor:
    """Rounds each value at random to one of its two neighbours in a 16-bit dtype, so that the mean is the value.

    A value between the neighbours a < x < b becomes b with probability (x - a) / (b - a), to within 2^-24, and one that
    the dtype holds stays as it is. A finite value beyond the largest one of the dtype becomes that; infinities and NaN
    stay. Below 2^-119, where bfloat16's numbers lie closer than 2^-126, the neighbours are multiples of 2^-126.

    Args:
        values: Float32, of any shape.
        dtype: "bfloat16" or "float16", as a name, a `tf.DType` or a NumPy dtype.
        seed: Int32 [2]. The same seed rounds the same way; take another one at each step.

    Returns:
        A tensor of that dtype and shape.

    Raises:
        InvalidArgument: For another dtype.
    """
    dtype, values = _sixteen_bits(dtype), tf.convert_to_tensor(values, tf.float32)
    step = _spacing(values, dtype)
    # Quotients by a power of two and sums below 2^24 are exact: nothing is rounded but by the floor.
    quotient = values / step
    below = tf.floor(quotient)
    chance = tf.random.stateless_uniform(tf.shape(values), seed)
    rounded = (below + tf.cast(chance < quotient - below, tf.float32)) * step
    return tf.cast(tf.where(tf.math.is_finite(values), _saturated(rounded, dtype), values), dtype)


def add_compensated(weights: tf.Tensor, compensation: tf.Tensor, update: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Weights plus an update, and what rounding has taken from them so far (Kahan).

        y = update - compensation
        new = round(weights + y)
        compensation = round((new - weights) - y)

    Args:
        weights: Bfloat16 or float16, of any shape.
        compensation: The same, zeros before the first update.
        update: Float32, what is to be added.

    Returns:
        The new weights and the new compensation, of the weights' dtype. A weight that is pushed beyond the dtype's
        largest value stays there.

    Raises:
        InvalidArgument: For another dtype.
    """
    dtype = _sixteen_bits(weights.dtype)
    old = tf.cast(weights, tf.float32)
    wanted = tf.cast(update, tf.float32) - tf.cast(compensation, tf.float32)
    new = _nearest(old + wanted, dtype)
    return tf.cast(new, dtype), tf.cast(_nearest((new - old) - wanted, dtype), dtype)


def _nearest(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Float32 values rounded to nearest, ties to even, in the dtype, and still as float32.

    Not a cast there and back: XLA is allowed to leave out such a pair (xla_allow_excess_precision), and with it the
    rounding.
    """
    step = _spacing(values, dtype)
    rounded = tf.round(values / step) * step
    return tf.where(tf.math.is_finite(values), _saturated(rounded, dtype), values)


def _saturated(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.clip_by_value(values, -_FORMATS[dtype].max, _FORMATS[dtype].max)


def _spacing(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The distance between the 16-bit dtype's numbers around each float32 value: a power of two, at least 2^-126."""
    known = _FORMATS[dtype]
    return bits.spacing(values, round(-math.log2(known.epsilon)), round(math.log2(known.smallest_normal)))


def _sixteen_bits(dtype: str | tf.DType | np.dtype | type) -> tf.DType:
    try:
        known = tf.as_dtype(dtype)
    except TypeError:
        known = None
    if known not in _FORMATS:
        raise InvalidArgument(f"dtype {dtype!r}: expected bfloat16 or float16.")
    return known
