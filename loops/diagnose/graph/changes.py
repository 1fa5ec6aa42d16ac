"""Changes a model, a step or an optimizer within a context, such as its dtype policy, and restores it at the end."""

from __future__ import annotations

import collections
import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.generators import generators, set_generators
from loops.backend.steps import schedule as made_with
from loops.backend.variables import variables_in_float32
from loops.step.parts import OwnStep

APART = 1e-3
"""The distance by which a value is moved away from a singular point: float16 can represent 1 - 1e-3 and 1e-3."""


@contextlib.contextmanager
def in_policy(layers: Iterable[keras.layers.Layer], policy: str) -> Iterator[None]:
    """Runs layers under another dtype policy; if its variables are float32, 16-bit variables are read as float32."""
    changed = list(layers)
    with contextlib.ExitStack() as stack:
        for layer in changed:
            stack.enter_context(with_value(layer, "dtype_policy", policy))
        wide = [layer for layer in changed if layer.variable_dtype == "float32"]
        with variables_in_float32({id(one): one for layer in wide for one in _narrow_variables(layer)}.values()):
            yield


def _narrow_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The layer's own trainable 16-bit variables. The step assigns to others, which must not be replaced."""
    of_parts = {id(one) for part in scaler.observe.layers_of(layer)[1:] for one in part.variables}
    trained = [one for one in layer.trainable_variables if id(one) not in of_parts]
    return [one for one in trained if one.dtype in ("float16", "bfloat16")]


@contextlib.contextmanager
def with_value(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of an object to another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def windows_of(train_step: Any) -> list[Any]:
    """The objects whose attribute `window` sums micro-batches: a `TrainStep`, or the groups of a `ComposedStep`."""
    owners = train_step.owners_of_windows() if isinstance(train_step, OwnStep) else []
    return [owner for owner in owners if owner.window is not None]


@contextlib.contextmanager
def without_windows(train_step: Any) -> Iterator[None]:
    """Within this context each micro-batch is a step of its own."""
    with contextlib.ExitStack() as stack:
        for owner in windows_of(train_step):
            stack.enter_context(with_value(owner, "window", None))
        yield


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute on an object, and removes or restores it at the end.

    It bypasses `__setattr__`, with which Keras's layers and TensorFlow's modules track assigned values.
    """
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


@contextlib.contextmanager
def with_changed_inputs(layer: keras.layers.Layer, change: Callable) -> Iterator[None]:
    """Applies a function to each input of a layer before its call."""

    def changed(layer: keras.layers.Layer, call: Callable, /, *arguments: Any, **options: Any) -> Any:
        return call(*tf.nest.map_structure(change, arguments), **options)

    with scaler.authoring.calls_through([layer], changed):
        yield


def moved_away(value: Any) -> Any:
    """A floating-point tensor plus `APART`, away from a point at which an operation has no value."""
    return value + tf.cast(APART, value.dtype) if tf.is_tensor(value) and value.dtype.is_floating else value


def with_finite_gradient(value: Any) -> Any:
    """The same tensor, with zeros for the non-finite values of its gradient."""
    return _finite_gradient(value) if tf.is_tensor(value) and value.dtype.is_floating else value


@tf.custom_gradient
def _finite_gradient(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    return tf.identity(value), lambda grad: tf.where(tf.math.is_finite(grad), grad, tf.zeros_like(grad))


@contextlib.contextmanager
def slower(optimizer: keras.optimizers.Optimizer, part: float) -> Iterator[None]:
    """Multiplies an optimizer's learning rate by a factor. The caller restores a rate that is a variable.

    Args:
        optimizer: The optimizer of the step.
        part: The factor, between 0 and 1.
    """
    schedule = made_with(optimizer)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        # On several replicas the rate is a variable of each, which float() does not accept.
        optimizer.learning_rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate)) * part
        yield
        return
    with scheduled(optimizer, lambda: schedule(optimizer.iterations) * part):
        yield


@contextlib.contextmanager
def scheduled(optimizer: keras.optimizers.Optimizer, schedule: Any) -> Iterator[None]:
    """Replaces an optimizer's learning rate schedule."""
    before = made_with(optimizer)
    optimizer.learning_rate = schedule
    try:
        yield
    finally:
        optimizer.learning_rate = before


@contextlib.contextmanager
def restored(layer: keras.layers.Layer) -> Iterator[None]:
    """Restores the variables of a layer and of the layers in it, and the random generators of the process."""
    variables = {id(variable): variable for one in scaler.observe.layers_of(layer) for variable in one.variables}
    values = [(variable, variable.numpy()) for variable in variables.values()]
    random = generators()
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
        set_generators(random)


POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16")
"""The policies that are compared."""


def own_policy(model: keras.Model) -> str:
    """The policy of the layers with most of the weights. The model around them may have another one."""
    counted: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    for layer in reversed(scaler.observe.layers_of(model)):  # A variable belongs to the innermost layer that has it.
        own = [variable for variable in layer.variables if id(variable) not in seen]
        seen.update(map(id, own))
        counted[layer.dtype_policy.name] += sum(math.prod(variable.shape) for variable in own)
    return counted.most_common(1)[0][0]


def following(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers with the model's own policy, which would change with it. Others were given a policy explicitly."""
    own = own_policy(model)
    return [
        layer
        for layer in scaler.observe.layers_of(model)
        if layer.dtype_policy.name == own and not isinstance(layer, keras.layers.InputLayer)
    ]


@contextlib.contextmanager
def under(model: keras.Model, policy: str) -> Iterator[None]:
    """Runs a model under another policy; its variables keep their dtype.

    Args:
        model: The model. Layers that were given another policy keep it.
        policy: Keras's name of the policy; the model's own changes nothing.
    """
    if policy == own_policy(model):
        yield
        return
    with in_policy(following(model), policy):
        yield


def loss_in_float32(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that casts 16-bit predictions to float32 first, as if the model's last layer were in float32."""
    if isinstance(loss, keras.losses.Loss):
        return loss  # It casts by itself, and `TrainStep` handles it as a keras Loss.

    def wide(y: Any, prediction: Any, *weight: Any) -> Any:
        return loss(y, tf.nest.map_structure(_wide, prediction), *weight)

    return wide


def _wide(tensor: Any) -> Any:
    narrow = tf.is_tensor(tensor) and tensor.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(tensor, tf.float32) if narrow else tensor


class _InFloat32(keras.DTypePolicy):
    """Computes in float32, with variables that keep their dtype."""

    def __init__(self, variable_dtype: str):
        super().__init__("float32")
        self._kept = variable_dtype

    @property
    def variable_dtype(self) -> str:
        """The variable dtype of the layer's own policy. Keras casts variables to float32 when the layer reads them."""
        return self._kept


@contextlib.contextmanager
def layers_in_float32(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Runs the float16 layers among these in float32 while a function is traced."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if layer.compute_dtype == "float16":
                stack.enter_context(with_value(layer, "dtype_policy", _InFloat32(layer.variable_dtype)))
        yield


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silences TensorFlow's warning about functions that are retraced often: a diagnosis retraces on purpose."""
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def rounding_is_no_warning() -> Iterator[None]:
    """Silences NumPy's warning about constants that overflow in float16: lint reports them as findings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered in cast", RuntimeWarning)
        yield
