"""Variables that are made beside a step: those of a scaler's state, and those that a step makes on its first call.

default_variable_creator_v2       a variable that a function    absent: a function that makes variables is traced twice
_variable_creator_scope             that is traced has not seen
_restore_from_tensors             is called when a checkpoint   absent: another shape gives TensorFlow's error, and
_gather_saveables_for_checkpoint    restores a variable           `StuckPolicy` also counts the restored steps; one
                                                                  warning

While an update is traced, assignments may change a variable only where a flag is true:

assign, assign_add, assign_sub    of TensorFlow's variables and their components on replicas, shadowed on the object
scatter_add, scatter_sub,         as those, for gradients with indices
scatter_update
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import is_eager
from scaler.backend.versions import say_once
from scaler.errors import InvalidArgument

_BEFORE_FUNCTIONS = 75
"""Who makes a variable is asked by priority, the highest first: 100 are strategies and users, 50 is `tf.function`."""
_OWNER = "_halfstep_owner"
_DENSE = ("assign", "assign_add", "assign_sub")
_FLAG = "halfstep_assigned_where"
_SPARSE = ("scatter_update", "scatter_add", "scatter_sub")


def overwrites(variable: object) -> bool:
    """Whether a variable takes its gradient as its new value, as the scales of Keras's float8 layers do.

    Such a gradient is not a derivative of the loss: it is not unscaled, not clipped, and not counted in any norm.
    """
    if isinstance(variable, tf.distribute.DistributedValues):
        # It looks for what it lacks in its component, which costs an operation.
        return bool(vars(variable).get("overwrite_with_gradient", False))
    return bool(getattr(variable, "overwrite_with_gradient", False))


def shared_variable(value: Any, name: str) -> tf.Variable:
    """Creates a variable with the same value on all replicas, which assign it together; of integers as int64."""
    value = replicas.on_any_device(value)
    return tf.Variable(value, trainable=False, name=name, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


@contextlib.contextmanager
def outside_the_graph() -> Iterator[None]:
    """Lifts the making of variables out of the function that is traced, as if they had been there before it.

    `tf.function` traces a function a second time if it saw a variable being made in the first trace, even in a
    `tf.init_scope`.
    """
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
        scope = getattr(graph, "_variable_creator_scope", None)
        if scope is None or not tf.executing_eagerly():
            yield
            return
        try:
            from tensorflow.python.ops.resource_variable_ops import default_variable_creator_v2 as make
        except ImportError:
            yield
            return
        with scope(lambda next_creator, **arguments: make(**arguments), priority=_BEFORE_FUNCTIONS):
            yield


def without_values(variables: Sequence) -> list:
    """Those of some variables that have no value yet.

    A function that makes variables while it is traced for the first time gives them values after that trace. It throws
    the trace away, and traces again.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return []
        return [variable for variable in variables if not all(map(_has_value, parts_of(variable)))]


def parts_of(variable: Any) -> Sequence:
    """A variable of TensorFlow's for each replica: those of which one of several replicas consists, or itself."""
    native = replicas.native(variable)
    return getattr(native, "values", (native,))


def _has_value(variable: tf.Variable) -> bool:
    """Whether a variable has been given a value."""
    return bool(tf.raw_ops.VarIsInitializedOp(resource=variable.handle))


def explain_other_shapes(variable: tf.Variable, what: str, remedy: str) -> None:
    """Refuses a checkpoint with another shape in one sentence. On several replicas TensorFlow refuses it itself.

    Args:
        variable: Whose value the checkpoint holds.
        what: What the variable holds.
        remedy: What to do, the end of the sentence.
    """
    restore = getattr(variable, "_restore_from_tensors", None)
    if variable.shape.rank == 0 or restore is None:
        return

    def checked(tensors: dict) -> Any:
        for value in tensors.values():
            check_restored_shape(value, variable.shape, what, remedy)
        return restore(tensors)

    object.__setattr__(variable, "_restore_from_tensors", checked)


def check_restored_shape(value: tf.Tensor, shape: tf.TensorShape, what: str, remedy: str) -> None:
    """Refuses a checkpoint's value of another shape."""
    if not value.shape.is_compatible_with(shape):
        raise InvalidArgument(
            f"the checkpoint holds {what} with shape {value.shape}, but this strategy has {shape}: {remedy}."
        )


def when_restored(variable: tf.Variable, call: Callable[[], None]) -> None:
    """Calls `call` whenever a checkpoint restores the variable, on any replica."""
    seen = False
    for part in (variable, *getattr(variable, "values", ())):
        restore = getattr(part, "_restore_from_tensors", None)
        if restore is not None:
            seen = True
            object.__setattr__(part, "_restore_from_tensors", _then(restore, call))
    gather = getattr(variable, "_gather_saveables_for_checkpoint", None)
    if gather is not None and isinstance(variable, tf.distribute.DistributedValues):
        seen = True
        object.__setattr__(variable, "_gather_saveables_for_checkpoint", lambda: _telling(gather(), call))
    if not seen:
        say_once("does not tell when a checkpoint is restored: StuckPolicy also counts the steps before it was saved.")


def _telling(saveables: dict, call: Callable[[], None]) -> dict:
    """What a checkpoint makes of a variable, each of which calls `call` when it is restored."""

    def told(make: Callable) -> Callable:
        def made(*arguments: Any, **named: Any) -> Any:
            saveable = make(*arguments, **named)
            saveable.restore = _then(saveable.restore, call)
            return saveable

        return made

    return {key: told(make) for key, make in saveables.items()}


def _then(restore: Callable, call: Callable[[], None]) -> Callable:
    """Calls `call`, then restores."""

    def restored(*arguments: Any, **named: Any) -> Any:
        call()
        return restore(*arguments, **named)

    return restored


def mark_owner(variable: tf.Variable, owner: object) -> None:
    """Records the owner of a variable and of its component on each replica, for `owner_of`."""
    _mark(variable, weakref.ref(owner))


def owner_of(variable: object) -> Any:
    """Returns the loss scaler whose state or counters a variable holds, or None for any other variable.

    A graph that assigns such a variable makes the scaler's decisions. A graph that only reads it does not. It is what
    `mark_owner` recorded, and None if the scaler no longer exists.

    Args:
        variable: For example one of `tf.function(step).get_concrete_function(batch).variables`.
    """
    reference = getattr(variable, _OWNER, None)
    return None if reference is None else reference()


def mark_private(variable: tf.Variable) -> None:
    """Records that a variable is a scaler's own, though a graph that assigns it makes no decision."""
    _mark(variable, lambda: None)


def _mark(variable: tf.Variable, owner: Callable[[], object]) -> None:
    """On the variable and on its components."""
    for part in (variable, *getattr(variable, "values", ())):
        object.__setattr__(part, _OWNER, owner)


def is_of_a_scaler(variable: object) -> bool:
    """Whether `mark_owner` or `mark_private` was called with the variable."""
    return hasattr(variable, _OWNER)


@contextlib.contextmanager
def shadowed(owner: Any, **values: Any) -> Iterator[None]:
    """Inside of it an object has these attributes, or methods, in the place of its own or of those of its class."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


@contextlib.contextmanager
def assigned_where(flag: tf.Tensor, variables: Iterable) -> Iterator[None]:
    """Inside of it an assignment to one of the variables keeps every bit of the old value where `flag` is false.

    Args:
        flag: Scalar bool, the same on all replicas.
        variables: TensorFlow's or Keras's.
    """
    natives = {id(native): native for native in map(replicas.native, variables)}
    parts = {id(part): part for native in natives.values() for part in getattr(native, "values", (native,))}
    for part in parts.values():
        shadows = {name: functools.partial(_assign_where, flag, part, name) for name in _DENSE}
        shadows |= {name: functools.partial(_scatter_where, flag, part, name) for name in _SPARSE}
        vars(part).update(shadows | {_FLAG: flag})
    try:
        yield
    finally:
        for part in parts.values():
            for name in (*_DENSE, *_SPARSE, _FLAG):
                del vars(part)[name]


def flag_of(variable: tf.Variable) -> tf.Tensor | None:
    """The flag of the `assigned_where` that the variable is in now, or None."""
    return vars(variable).get(_FLAG)


def assign_chosen(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value that was chosen by the flag already."""
    type(variable).assign(variable, value)


def _assign_where(flag: tf.Tensor, part: tf.Variable, method: str, /, value: Any, *unused: Any, **options: Any) -> Any:
    """An assignment of TensorFlow's to a component, where the flag is true."""
    old, new = tf.convert_to_tensor(part), tf.convert_to_tensor(value, part.dtype)
    if method != "assign":
        new = old + new if method == "assign_add" else old - new
    return type(part).assign(part, choose(flag, new, old), **options)


def _scatter_where(
    flag: tf.Tensor, part: tf.Variable, method: str, /, slices: tf.IndexedSlices, *unused: Any, **options: Any
) -> Any:
    """One with indices."""
    # An index may occur twice. All of its rows are then alike, before and after.
    old = tf.gather(part, slices.indices)
    getattr(type(part), method)(part, slices, **options)
    rows = tf.where(flag, tf.gather(part, slices.indices), old)
    return type(part).scatter_update(part, tf.IndexedSlices(rows, slices.indices), **options)


def either(flag: tf.Tensor, one: Callable[[], tuple], other: Callable[[], tuple]) -> tuple:
    """What `one` returns where the flag is true, else what `other` returns: tuples of tensors.

    In a branch that knows the flag only one of the two is traced.
    """
    known = _known(flag)
    if known is not None:
        return one() if known else other()
    return tuple(choose(flag, *pair) for pair in zip(one(), other(), strict=True))


def _known(flag: tf.Tensor) -> bool | None:
    """A constant of a graph; None for what only a step knows. An eager tensor may be on a GPU."""
    is_symbolic = isinstance(flag, tf.Tensor) and not is_eager(flag)
    return tf.get_static_value(flag) if is_symbolic and flag.op.type == "Const" else None


def choose(flag: tf.Tensor, one: Any, other: Any) -> tf.Tensor:
    """Returns `one` where the flag is true, else `other`, bit for bit.

    Args:
        flag: Scalar bool. One with a shape chooses element by element.
        one: A tensor, variable or number.
        other: Likewise, of the same shape. A number takes the other's dtype.
    """
    if not hasattr(one, "dtype"):
        other = tf.convert_to_tensor(other)
        one = tf.convert_to_tensor(one, other.dtype)
    else:
        one = tf.convert_to_tensor(one)
        other = tf.convert_to_tensor(other, one.dtype)
    alike = one.shape.rank is not None and one.shape.is_compatible_with(other.shape)
    if flag.shape.rank == 0 and alike:
        known = _known(flag)
        if known is not None:
            return one if known else other
        # On a CPU it passes one of the two on. `tf.where` writes a new tensor, as if the flag had a value for each
        # element: for 16,384 float32 that takes 25 microseconds.
        return tf.raw_ops.Select(condition=flag, x=one, y=other)
    return tf.where(flag, one, other)
