"""Communication between replicas. On a single device each function does the same for one replica."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.graphs import counts_alone
from scaler.errors import InvalidArgument


def replica_count() -> int:
    """The number of replicas of the current `tf.distribute` strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def in_place() -> bool:
    """Whether there is one replica, and it runs in the thread that calls it.

    Other strategies start a thread for it, also for a single one. There a function inside of a step cannot merge.
    """
    return not tf.distribute.has_strategy() or isinstance(tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy)


def in_scope(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager:
    """The scope of a strategy, or nothing if this is inside it."""
    return contextlib.nullcontext() if strategy is tf.distribute.get_strategy() else strategy.scope()


def merge(function: Callable, *values: Any) -> Any:
    """Calls `function(strategy, *values)` once for all replicas, with the values that each replica passed.

    Raises:
        InvalidArgument: In the scope of a strategy, but outside `strategy.run`, where there is no replica.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise InvalidArgument(
            "a loss scaler works inside strategy.run(step, ...), where each replica has its gradients. This call was "
            "in the scope of a strategy, but outside of run."
        )
    return context.merge_call(no_autograph(lambda *shares: function(*shares)), args=values)


def check_inside(variables: Iterable) -> None:
    """Refuses variables of a strategy in a call outside of it, where they have no values to move.

    Raises:
        InvalidArgument: With what to do.
    """
    if tf.distribute.has_strategy():
        return
    for own in map(native, variables):
        if isinstance(own, tf.distribute.DistributedValues):
            raise InvalidArgument(
                f"apply: variable {own.name!r} belongs to a {type(own.distribute_strategy).__name__}, and this call is "
                "outside of it: expected a step inside strategy.run(step, ...), or Loop(step, data, strategy=strategy)."
            )


def map_replicas(strategy: tf.distribute.Strategy, function: Callable, *values: Any) -> Any:
    """Calls `function` on every replica with its share of `values`. Use it inside the function passed to `merge`."""
    return strategy.extended.call_for_each_replica(no_autograph(lambda *shares: function(*shares)), args=values)


def local_values(strategy: tf.distribute.Strategy, value: Any) -> tuple:
    """The components of `value` on all replicas of this machine."""
    return strategy.experimental_local_results(value)


def total(strategy: tf.distribute.Strategy, tensors: Sequence) -> list:
    """The sum of each tensor over all replicas, on every replica."""
    if strategy.num_replicas_in_sync == 1:
        return list(tensors)
    dtypes = [local_values(strategy, tensor)[0].dtype for tensor in tensors]
    sums = {}
    # TensorFlow joins what it reduces together into one tensor, of one dtype.
    for dtype in dict.fromkeys(dtypes):
        pairs = [(tensor, tensor) for tensor, own in zip(tensors, dtypes, strict=True) if own == dtype]
        sums[dtype] = iter(strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs))
    return [next(sums[dtype]) for dtype in dtypes]


def any_of(strategy: tf.distribute.Strategy, flag: Any) -> tf.Tensor:
    """Whether `flag`, scalar bool, is true on any replica of any worker."""
    if strategy.num_replicas_in_sync == 1:
        return flag
    own = local_values(strategy, flag)
    if len(own) == strategy.num_replicas_in_sync:
        return functools.reduce(tf.logical_or, own)  # All replicas are here.
    return _reduced(strategy, map_replicas(strategy, lambda value: tf.cast(value, tf.float32), flag)) > 0


def all_of(strategy: tf.distribute.Strategy, flag: Any) -> tf.Tensor:
    """Whether `flag`, scalar bool, is true on all replicas of all workers."""
    if strategy.num_replicas_in_sync == 1:
        return flag
    own = local_values(strategy, flag)
    if len(own) == strategy.num_replicas_in_sync:
        return functools.reduce(tf.logical_and, own)
    return tf.logical_not(any_of(strategy, map_replicas(strategy, tf.logical_not, flag)))


def all_agree(strategy: tf.distribute.Strategy, flag: Any) -> tf.Tensor:
    """As `all_of`, without a sum over the replicas where a graph shows that `flag` is the same on all of them."""
    parts = local_values(strategy, flag)
    if strategy.num_replicas_in_sync == 1:
        return parts[0]
    if tf.executing_eagerly():
        return all_of(strategy, flag)
    known = [tf.get_static_value(part) for part in parts]
    if None not in known:
        return tf.constant(bool(all(known)))
    return parts[0] if all(map(counts_alone, parts)) else all_of(strategy, flag)


def largest_of(strategy: tf.distribute.Strategy, number: Any) -> tf.Tensor:
    """The largest `number`, a floating-point scalar, on any replica of all workers. Infinity if one is NaN."""
    if strategy.num_replicas_in_sync == 1:
        return local_values(strategy, number)[0]

    def place(value: tf.Tensor) -> tf.Tensor:
        return one_hot_by_replica(tf.where(tf.math.is_nan(value), tf.constant(float("inf"), value.dtype), value))

    return tf.reduce_max(_reduced(strategy, map_replicas(strategy, place, number)))


def one_hot_by_replica(value: tf.Tensor) -> tf.Tensor:
    """This replica's `value`, [...], among zeros for all others: [replicas, ...]. Their sum holds all values."""
    context = tf.distribute.get_replica_context()
    count = context.num_replicas_in_sync
    own = tf.one_hot(context.replica_id_in_sync_group, count, True, False)
    return tf.where(tf.reshape(own, [count] + [1] * value.shape.rank), value, tf.zeros_like(value))


def sum_of(strategy: tf.distribute.Strategy, number: Any) -> tf.Tensor:
    """The sum of `number`, a scalar, over the replicas of all workers."""
    return local_values(strategy, total(strategy, [number])[0])[0]


def first_of(strategy: tf.distribute.Strategy, flag: Any) -> tf.Tensor:
    """The first replica of all workers on which `flag`, scalar bool, is true: scalar int64, -1 if on all or on none."""
    marks = map_replicas(strategy, lambda flag: one_hot_by_replica(tf.cast(flag, tf.float32)), flag)
    marked = _reduced(strategy, marks) > 0
    alike = tf.equal(tf.reduce_any(marked), tf.reduce_all(marked))
    first = tf.argmax(tf.cast(marked, tf.float32))
    return tf.where(alike, -tf.ones_like(first), first)


def _reduced(strategy: tf.distribute.Strategy, values: Any) -> tf.Tensor:
    """The sum of a tensor over the replicas of all workers."""
    return local_values(strategy, strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, values, values))[0]


def native(variable: Any) -> tf.Variable:
    """Returns TensorFlow's variable inside a Keras variable, or the variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def assign_each(strategy: tf.distribute.Strategy, variable: Any, function: Callable, *values: Any) -> None:
    """Assigns `function(variable, *values)` on every replica, with the replica's share of `values`."""

    @no_autograph
    def assign(own: Any, *shares: Any) -> None:
        own.assign(function(own, *shares))

    own = native(variable)
    if isinstance(own, tf.distribute.DistributedValues):
        strategy.extended.update(own, assign, args=values, group=False)
    else:  # Of a single replica a graph knows the component, which a MirroredStrategy does not update.
        assign(own, *values)


def assign_alike(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns the same value on all replicas, once for all of them. None of them waits for another."""
    if isinstance(variable, tf.distribute.DistributedValues):
        assign = no_autograph(lambda own, value: own.assign(value))
        tf.distribute.get_strategy().extended.update(variable, assign, args=(value,), group=False)
    else:
        variable.assign(value)


def own_component(variable: Any) -> Any:
    """Returns what a replica may assign by itself: its component of a variable with aggregated assignments.

    An assignment to the whole variable would add up a change that is the same on each replica.
    """
    own = native(variable)
    if not isinstance(own, tf.distribute.DistributedValues) or own.aggregation == tf.VariableAggregation.NONE:
        return variable
    return own_part(own)


def own_part(variable: Any) -> Any:
    """Returns a replica's component of a variable, TensorFlow's own, or the variable itself."""
    own = native(variable)
    if not isinstance(own, tf.distribute.DistributedValues):
        return own
    context = tf.distribute.get_replica_context()
    parts = local_values(context.strategy, own)
    return parts[int(tf.get_static_value(context.replica_id_in_sync_group)) % len(parts)]


def on_any_device(value: Any) -> tf.Tensor:
    """The value with a dtype of which a GPU can have a variable: int64 in place of int32.

    TensorFlow keeps int32 variables on the host, and what XLA compiles for a GPU cannot read them.
    """
    value = tf.convert_to_tensor(value)
    return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value


def local_variable(
    value: Any, name: str, aggregation: tf.VariableAggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
) -> tf.Variable:
    """Creates a variable that each replica reads and assigns for itself; of integers as int64.

    Args:
        value: At first.
        name: Its name.
        aggregation: What a checkpoint holds of the replicas' values.
    """
    return tf.Variable(
        on_any_device(value),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation,
    )


def replica_values(variable: tf.Variable) -> list[tf.Tensor]:
    """What each replica of this process has in a `local_variable`."""
    return [tf.convert_to_tensor(part) for part in getattr(variable, "values", (variable,))]
