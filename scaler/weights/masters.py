"""Float32 copies of 16-bit variables, which the optimizer updates in their place.

A float16 weight w cannot hold an update smaller than w * 2^-12: it rounds back to w. Its float32 master keeps it
(Micikevicius et al. 2018, section 3.1, https://arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.variables import outside_the_graph
from scaler.checks import as_variables
from scaler.errors import InvalidArgument
from scaler.weights.trainable import TrainableSet

_COPIED = (tf.float16, tf.bfloat16)


class MasterWeights(tf.Module):
    """Float32 master weights for any mix of float16, bfloat16, float32 and float64 variables.

    A 16-bit variable gets a float32 copy; any other variable is its own master. Pass the object wherever a list of
    variables is expected: `loss_scaler.apply(optimizer, grads, masters)`. Save it beside the model
    (`tf.train.Checkpoint(model=model, masters=masters, state=model.non_trainable_variables, ...)`): the model holds
    only the rounded values, and a checkpoint of a Keras model alone lacks the seeds of its Dropout layers.

    It belongs to the variables it was made for. Setting `layer.trainable` changes `model.trainable_variables`: then
    make new masters, and a new optimizer. New masters start from the rounded weights.

    Assign to the variables, not to `weights`: a variable that differs from its master wins at the next update. Two
    objects over one variable would take each other's updates for assigned values, and lose what rounding had kept.

    Args:
        variables: The model's trainable variables.

    Raises:
        InvalidArgument: For an empty list, a variable given twice or another dtype.
    """

    compiles = True
    """Whether updates may be compiled a few variables at a time, with `refresh` and `write` called more than once."""

    def __init__(self, variables: Sequence, name: str = "master_weights"):
        super().__init__(name=name)
        if isinstance(variables, keras.Model):
            raise InvalidArgument("MasterWeights(model): expected a list of variables: model.trainable_variables.")
        variables = as_variables(type(self).__name__, variables)
        _check(variables)
        self._model_variables = variables
        self.in_update = False
        with outside_the_graph():
            self._trainable = TrainableSet.of(variables)
            self._weights = [_master(v) if tf.as_dtype(v.dtype) in _COPIED else v for v in variables]

    def __repr__(self) -> str:
        copied = [master.shape.num_elements() for _, master in self._copies()]
        return (
            f"{type(self).__name__}: {len(copied)} of {len(self._weights)} variables have a float32 copy, "
            f"{sum(copied):,} values, {4 * sum(copied) / 1e6:,.1f} MB"
        )

    in_update: bool
    """Whether this is between a `refresh` and the `write` after it, where masters and variables need not agree."""

    @property
    def model_variables(self) -> list:
        """The variables given, in their order."""
        return list(self._model_variables)

    def trained(self, grads: Sequence) -> TrainableSet:
        """The variables that have a gradient, each with whether it was trainable when this was made."""
        pairs = zip(self._trainable.variables, self._trainable.flags, grads, strict=True)
        return TrainableSet(
            *zip(*((variable, flag) for variable, flag, grad in pairs if grad is not None), strict=True)
        )

    @property
    def weights(self) -> list:
        """One float32 variable for each model variable: what the optimizer updates."""
        return list(self._weights)

    def refresh(self, weights: Sequence | None = None) -> None:
        """Takes over values that were assigned to the model: where a master, once rounded, differs from its variable.

        `LossScaler.apply` does this before each update. Otherwise the first step after `set_weights` or
        `load_weights` would write the old weights back.

        Args:
            weights: Those of `weights` to look at; all if not given.
        """
        self.in_update = True
        for variable, master in self._copies(weights):
            replicas.assign_each(tf.distribute.get_strategy(), master, self._refreshed, variable)

    def _refreshed(self, master: tf.Variable, variable: tf.Variable) -> tf.Tensor:
        return refreshed(master, variable)

    def write(self, weights: Sequence | None = None) -> None:
        """Rounds the masters into the model's variables.

        A master beyond the largest finite value of the variable's dtype gives that value, not infinity.

        Args:
            weights: Those of `weights` to round; all if not given.
        """
        for variable, master in self._copies(weights):
            replicas.assign_each(
                tf.distribute.get_strategy(), variable, lambda own, new: rounded(new, own.dtype), master
            )
        self.in_update = False

    def rounded_into(self, weights: Sequence) -> list[tf.Variable | None]:
        """For each of these `weights` the 16-bit variable it is rounded into; None where the model holds it itself."""
        copies = {id(master): variable for variable, master in self._copies(weights)}
        return [copies.get(id(weight)) for weight in weights]

    def _copies(self, weights: Sequence | None = None) -> list[tuple[tf.Variable, tf.Variable]]:
        wanted = None if weights is None else {id(weight) for weight in weights}
        return [
            (replicas.native(variable), master)
            for variable, master in zip(self._model_variables, self._weights, strict=True)
            if variable is not master and (wanted is None or id(master) in wanted)
        ]


def refreshed(master: tf.Tensor, variable: tf.Tensor) -> tf.Tensor:
    """The master's values; where they do not round to those of the 16-bit variable, the variable's."""
    return tf.where(tf.equal(rounded(master, variable.dtype), variable), master, tf.cast(variable, tf.float32))


def rounded(master: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The master in a 16-bit format, its largest finite value at most."""
    return tf.saturate_cast(master, dtype)


def _master(variable: keras.Variable | tf.Variable) -> tf.Variable:
    native = replicas.native(variable)
    distributed = isinstance(native, tf.distribute.DistributedValues)
    with native.distribute_strategy.scope() if distributed else contextlib.nullcontext(), tf.name_scope(""):
        master = tf.Variable(
            tf.cast(variable, tf.float32),
            name=native.name.split(":")[0],
            constraint=getattr(variable, "constraint", None),
        )
    master.copy_of = variable
    # Optimizers tell variables apart by these (Muon by path, float8 layers by the mark).
    for attribute in ("path", "overwrite_with_gradient"):
        if hasattr(variable, attribute):
            setattr(master, attribute, getattr(variable, attribute))
    return master


def _check(variables: list) -> None:
    if not variables:
        raise InvalidArgument(
            "MasterWeights([]): expected at least one variable. Build the model before reading its variables."
        )
    if len({id(variable) for variable in variables}) < len(variables):
        raise InvalidArgument("MasterWeights: a variable was given twice; each needs exactly one master.")
    for variable in variables:
        dtype = tf.as_dtype(variable.dtype)
        if dtype not in (*_COPIED, tf.float32, tf.float64):
            raise InvalidArgument(
                f"MasterWeights: variable {variable.name!r} has dtype {dtype.name}: expected float16, "
                "bfloat16, float32 or float64."
            )
