"""What is known about a Keras optimizer beyond its public interface.

_trainable_variables  what it was built for          absent: Keras itself refuses other variables; a second, unscaled
optimizer in a model under `protect` is refused
_var_key              how it tells variables apart   absent: by identity; settings for single variables do not apply
to their masters
_use_weight_decay     whether it decays a variable   absent: weight decay with masters is refused
_exclude_from_weight_decay  keys of excluded ones    absent: a master decays that was excluded in place of its variable
_optimizer_map        how a MultiOptimizer chooses   absent: a MultiOptimizer with masters is refused
_learning_rate        the schedule behind it         absent: nothing is proven: updates are checked, which is slower
and gives the same numbers

An optimizer of Keras 2 comes from the package tf-keras, or from `tf.keras` with TF_USE_LEGACY_KERAS=1, and is known by
its methods:

_index_dict        what it was built for             absent: tf-keras itself refuses other variables
_var_key           how it tells variables apart      absent: as above
_use_weight_decay  whether it decays a variable      absent: weight decay with masters is refused

A twin of an optimizer: its own arithmetic on tensors that stand in for one variable and the slots of that variable.

_get_variable_index       finds the slots of a variable     absent: small variables are not joined: slower, with the
_use_weight_decay         whether it decays a variable        same numbers
_distribution_strategy    runs the decay of a variable
_trainable_variables      how many slots there are
_var_key                  how it tells variables apart       may stand on the optimizer itself, as masters share keys
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.variables import outside_the_graph, shadowed
from scaler.backend.versions import say_once, unsupported
from scaler.errors import InvalidArgument

UNKNOWN = object()
_METHODS = ("apply_gradients", "build", "iterations", "variables")


def built_for(optimizer: Any) -> list | None:
    """The variables that an optimizer was built for, or None if Keras does not tell."""
    known = getattr(optimizer, "_trainable_variables", None)
    return None if known is None else known[:]


def have_it_go_through(optimizer: Any, variables: list) -> None:
    """Gives an optimizer another list of the same variables, for callbacks that iterate over it between steps."""
    if built_for(optimizer) is not None:
        vars(optimizer)["_trainable_variables"] = variables
    elif getattr(optimizer, "use_ema", False):
        say_once(
            "does not show the variables that an optimizer updates: keras.callbacks.SwapEMAWeights leaves 16-bit "
            "weights as they are. Call optimizer.finalize_variable_values(model.trainable_variables) instead."
        )


def learning_rate_source(optimizer: Any) -> Any:
    """The number, variable, schedule or function that gives the learning rate. `UNKNOWN` if Keras does not tell."""
    return getattr(optimizer, "_learning_rate", UNKNOWN)


def key_of(optimizer: Any, variable: Any) -> Any:
    """The key by which an optimizer's class tells variables apart."""
    own_key = getattr(type(optimizer), "_var_key", None)
    return id(replicas.native(variable)) if own_key is None else own_key(optimizer, variable)


@contextlib.contextmanager
def knowing_masters(optimizer: Any, variables: Sequence) -> Iterator[None]:
    """Makes an optimizer treat a master like the variable that it copies, also inside a MultiOptimizer.

    Keras stores settings for single variables by a key of each variable. The masters share these keys from here on. A
    MultiOptimizer chooses among its optimizers while it is built: build it in this context. It then chooses by the
    variable, not by its master.

    Raises:
        UnsupportedVersion: If these versions do not allow it and numbers would change.
    """
    copies = [variable for variable in variables if hasattr(variable, "copy_of")]
    if not copies:
        yield
        return
    _share_keys(optimizer, copies)
    if hasattr(optimizer, "optimizers"):
        with _choosing_by_the_model(optimizer, copies):
            yield
    else:
        yield
    for each in getattr(optimizer, "optimizers", [optimizer]):
        _check_decay(each, copies)


def exclude_masters(optimizer: Any, variables: Sequence) -> None:
    """Has an optimizer that was built with masters leave those out of weight decay whose variables it leaves out."""
    for each in getattr(optimizer, "optimizers", [optimizer]):
        excluded: set = getattr(each, "_exclude_from_weight_decay", set())
        # On several replicas it costs an operation to ask a variable for what it lacks.
        copies = [variable for variable in variables if hasattr(variable, "copy_of")] if excluded else []
        excluded |= {key_of(each, master) for master in copies if key_of(each, master.copy_of) in excluded}


@contextlib.contextmanager
def _choosing_by_the_model(optimizer: Any, copies: Sequence) -> Iterator[None]:
    """Within it a MultiOptimizer chooses for a master as for its variable."""
    choose: Any = vars(optimizer).get("_optimizer_map")
    asked = []

    def chosen_for(variable: Any) -> Any:
        asked.append(variable)
        chosen = choose(getattr(variable, "copy_of", variable))
        if "_var_key" not in vars(chosen):
            _share_keys(chosen, copies)
        return chosen

    with shadowed(optimizer, _optimizer_map=chosen_for):
        yield
    if not asked:
        raise unsupported("apply", "does not show how a MultiOptimizer chooses: it cannot work with float32 masters.")


def _share_keys(optimizer: Any, copies: Sequence) -> None:
    """Gives masters the keys of their variables."""
    if not hasattr(type(optimizer), "_var_key"):
        return
    own_key = functools.partial(type(optimizer)._var_key, optimizer)
    of = {own_key(master): own_key(master.copy_of) for master in copies}
    excluded: set = getattr(optimizer, "_exclude_from_weight_decay", set())
    excluded |= {of[key] for key in excluded if key in of}
    vars(optimizer)["_var_key"] = functools.partial(_key, own_key, of)


def _key(own_key: Callable, of: dict, variable: Any) -> Any:
    """The key of a variable, or of what it copies."""
    key = own_key(variable)
    return of.get(key, key)


def _check_decay(optimizer: Any, copies: Sequence) -> None:
    """Refuses an optimizer that may decay a master and not its variable."""
    if not getattr(optimizer, "weight_decay", None):
        return
    decays = getattr(optimizer, "_use_weight_decay", None)
    if decays is None or any(decays(master) is not decays(master.copy_of) for master in copies):
        raise unsupported(
            "apply",
            f"does not tell which variables {type(optimizer).__name__} leaves out of weight decay, or does not for "
            "their float32 masters. A master might decay although its variable was excluded.",
        )


def is_of_keras_two(optimizer: object) -> bool:
    """Whether it is such an optimizer; not one of those that tf-keras calls legacy, which have no `build`."""
    return not hasattr(optimizer, "apply") and all(hasattr(optimizer, name) for name in _METHODS)


class KerasTwo:
    """Calls `apply_gradients` with gradients that are summed over the replicas already.

    Args:
        optimizer: For which `is_of_keras_two` is true.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self.__name__ = type(optimizer).__name__

    @property
    def variables(self) -> list:
        """Slots, iterations, the learning rate."""
        found = self._optimizer.variables
        return list(found() if callable(found) else found)

    def build(self, variables: Sequence) -> None:
        """Creates the slots, unless they are there.

        Raises:
            InvalidArgument: If it was built for other variables, or decays a master whose variable it does not decay.
        """
        natives = list(map(replicas.native, variables))
        with outside_the_graph():
            self._optimizer.build(natives)
        known, key_of = getattr(self._optimizer, "_index_dict", None), getattr(self._optimizer, "_var_key", None)
        if known is not None and key_of is not None and any(key_of(variable) not in known for variable in natives):
            raise InvalidArgument(
                f"apply: the optimizer {self._optimizer.name!r} was built for other variables than {natives[0].name!r} "
                "and those beside it. One optimizer goes with one MasterWeights, or with one list of variables: make a "
                "new one."
            )
        self._check_decay([master for master in variables if hasattr(master, "copy_of")])

    def _check_decay(self, masters: Sequence) -> None:
        """Refuses weight decay of a master whose variable is excluded."""
        if not masters or not getattr(self._optimizer, "weight_decay", None):
            return
        decays = getattr(self._optimizer, "_use_weight_decay", None)
        for master in masters:
            if decays is None or bool(decays(master)) != bool(decays(replicas.native(master.copy_of))):
                raise InvalidArgument(
                    f"apply: {self.__name__} leaves variable {master.name!r} out of its weight decay, but would decay "
                    "its float32 master. Exclude it by its name, exclude_from_weight_decay(var_names=[...]), or use an "
                    "optimizer of Keras 3."
                )

    def apply(self, grads: Sequence, variables: Sequence) -> None:
        """Moves the variables. On several replicas each calls it with the same gradients."""
        pairs = zip(grads, map(replicas.native, variables), strict=True)
        self._optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)


_NAMES = ("_get_variable_index", "_use_weight_decay", "_distribution_strategy")
_NOT_SLOTS = ("_trainable_variables", "_variables")
_CHANGES: dict[str, Callable[[tf.Tensor, Any], tf.Tensor]] = {
    "assign_add": lambda value, by: value + by,
    "assign_sub": lambda value, by: value - by,
}


class AssignableTensor:
    """A tensor that can be assigned: what an optimizer sees in the place of a variable. It lives while it is traced.

    Args:
        read: Returns the tensor. It is called if anybody asks for the value.
        dtype: That of the tensor.

    Attributes:
        only: The name of the method and its argument, if all that was done to it is one addition or subtraction.
        changes: How much was done to it.
    """

    def __init__(self, read: Callable[[], tf.Tensor], dtype: tf.DType):
        self._read, self.dtype = read, dtype
        self._value: tf.Tensor | None = None
        self.only: tuple[str, tf.Tensor] | None = None
        self.changes = 0

    @property
    def value(self) -> tf.Tensor:
        """The tensor, as it is now."""
        if self._value is None:
            before = self._read()
            self._value = before if self.only is None else _CHANGES[self.only[0]](before, self.only[1])
        return self._value

    def assign(self, value: tf.Tensor) -> None:
        """Takes another value."""
        self._value, self.only = tf.convert_to_tensor(value), None
        self.changes += 1

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to it."""
        self._change("assign_add", value)

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from it."""
        self._change("assign_sub", value)

    def _change(self, method: str, by: tf.Tensor) -> None:
        """Remembers a first addition or subtraction, and computes any other."""
        if self.changes or self._value is not None:
            self.assign(_CHANGES[method](self.value, by))
        else:
            self.only, self.changes = (method, tf.convert_to_tensor(by)), 1

    def __mul__(self, factor: Any) -> tf.Tensor:
        return self.value * factor

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype, name)


def can_have_twins(optimizer: Any) -> bool:
    """Whether Keras shows what a twin needs, of which it warns once if not, and all methods are those of the class.

    A method that somebody put on the optimizer itself works on that optimizer, and not on a twin.
    """
    for name in vars(optimizer):
        if name != "_var_key" and callable(getattr(type(optimizer), name, None)):
            return False
    gone = [name for name in _NAMES if not hasattr(optimizer, name)]
    if gone or built_for(optimizer) is None:
        say_once(
            f"have no {', '.join(gone) or _NOT_SLOTS[0]}: small variables are updated one by one. Slower, with the "
            "same numbers."
        )
        return False
    return True


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether the optimizer's weight decay applies to the variable.

    Keras asks of the TensorFlow variable, whose name is the path: that of a Keras variable is "kernel" in every layer.
    """
    return bool(optimizer.weight_decay) and bool(optimizer._use_weight_decay(replicas.native(variable)))


def slots_of(optimizer: Any, variable: Any) -> dict[str, tf.Variable]:
    """The slots of a variable by the names of the lists that hold them: for Adam `_momentums` and `_velocities`."""
    place, count = optimizer._get_variable_index(variable), len(optimizer._trainable_variables)
    slots = {}
    for name, found in vars(optimizer).items():
        is_a_list = isinstance(found, list) and len(found) == count and name not in _NOT_SLOTS
        # Keras counts every variable that an attribute holds among the optimizer's own.
        if is_a_list and isinstance(found[place], keras.Variable):
            slots[name] = found[place].value
    return slots


def twin(optimizer: Any, slots: Mapping[str, AssignableTensor], *, decaying: bool) -> Any:
    """An optimizer of the same class and settings, whose `update_step` moves these slots with any variable.

    Args:
        optimizer: It is left alone.
        slots: By the names of `slots_of`.
        decaying: Whether weight decay applies.
    """
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    vars(other).update({name: [slot] for name, slot in slots.items()})
    vars(other).update(
        _get_variable_index=lambda variable: 0,
        _use_weight_decay=lambda variable: decaying,
        _distribution_strategy=types.SimpleNamespace(extended=types.SimpleNamespace(update=_call)),
    )
    return other


def _call(variable: AssignableTensor, function: Callable, args: tuple = (), group: bool = False) -> None:
    """Updates a variable without a `tf.distribute` strategy."""
    del group
    function(variable, *args)
