"""Rolls back, under `fit`, what the forward pass of a skipped step has moved; finds the optimizers of a model."""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.graphs import call_noninlined
from scaler.backend.layers import cast_penalties, state_of, unused
from scaler.backend.optimizers import built_for
from scaler.backend.versions import unsupported
from scaler.errors import InvalidArgument, ScaleWarning
from scaler.gate.layer_state import LayerState
from scaler.gate.proofs import selects_by_default
from scaler.gate.rollback import all_finite, state_to_keep
from scaler.keras.optimizer import LossScaleOptimizer, warn_if_stuck
from scaler.keras.shown_metrics import Shown
from scaler.keras.variables import ProtectedStep
from scaler.misuse.moving_statistics import warn_of_narrow_statistics
from scaler.weights.trainable import TrainableSet

_MARK = "_scaler_protected"


def protect(model: keras.Model) -> keras.Model:
    """Makes a skipped step under `fit` and `train_on_batch` roll back everything that it moved beside the weights.

        model.compile(scaler.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse")
        scaler.protect(model)

    BatchNorm's statistics, seed generators and metrics move in the forward pass, before the optimizer runs. `protect`
    wraps `model.train_step`, Keras's or your own. Before each step it saves the values of `model.variables` and of the
    metrics, except variables that an optimizer updates. A skipped step restores these values bit for bit. This includes
    weights that the step itself assigns, such as those of a teacher that follows the model. An applied step restores
    the elements of non-trainable state that became non-finite. If the step itself assigns weights that an optimizer
    updates, a skip restores only those of their elements that became non-finite. If the inner optimizer accumulates
    gradients, each non-finite micro-batch is rolled back by itself. The other micro-batches of its window still count.

    The logs show what a step returns, but the model's metrics are computed again after the rollback. If all steps since
    the start of an epoch were skipped, the metrics show what the last step counted, provided that is finite. Otherwise,
    and at the end of such an epoch, they show the worst value: infinity for a loss, minus infinity for a metric that
    Keras wants large, NaN if Keras does not know.

    The model may have no `call`, contain other models, and define its own `train_step`. The protection belongs to this
    object: call `protect` again for a loaded or cloned model. You may call it before or after `compile`, and more than
    once.

    Args:
        model: A Keras model. At its first step it must be compiled with a `LossScaleOptimizer`, or hold some in
            attributes, also in lists and dicts or on layers; those of compiled models inside count, too. A skip by any
            of them rolls back all of the state, and nothing that another optimizer has applied.

    Returns:
        The model.

    Raises:
        InvalidArgument: If `model` is not a Keras model. At the first step, if there is no `LossScaleOptimizer`, if
            the step applies gradients with one that the model does not hold, or if it creates variables whose earlier
            values cannot be known.
    """
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"protect({model!r}): expected a keras.Model.")
    if is_protected(model):
        return model
    if getattr(model, "compiled", False) and not loss_scale_optimizers(model) and not_restored(model):
        warnings.warn(
            f"protect: model {model.name!r} is compiled with {type(model.optimizer).__name__} and not with an "
            f"hs.LossScaleOptimizer.{not_restored(model)}",
            ScaleWarning,
            stacklevel=2,
        )
    shown = Shown(model)
    protected, others = ProtectedStep(model.name), LayerState()
    made: list = []
    looked: list[bool] = []
    own_step, own_reset, own_results = model.train_step, model.reset_metrics, model.get_metrics_result

    @functools.wraps(own_step)
    def train_step(data: Any) -> Any:
        optimizers = _optimizers(model)
        # The optimizer alone cannot notice that layers were unfrozen.
        TrainableSet.of(model.weights).keep(f"fit of model {model.name!r}", "Compile the model again.")
        shown.listen()

        def tell(graph: Any) -> None:
            protected.traced_as(graph)
            others.learn(graph, _all_variables(model))

        with protected.open(optimizers), others.watched(apart_from=_all_variables(model)):
            step = _with_its_variables(lambda data: shown.look(own_step(data)), data, model, made, tell)
        if not looked:
            looked.append(True)
            warn_of_narrow_statistics(model)
        # Of several replicas each is traced while the step runs, which may assign any variable by itself.
        before = [
            (one, tf.identity(one))
            for one, is_state in _variables(model, protected)
            if is_state or not replicas.in_place() or protected.assigns(one)
        ]
        every = [held.optimizer for held in optimizers_of(model)]
        steps_of = [(optimizer, tf.identity(optimizer.iterations)) for optimizer in every]
        seen = [optimizer.seen for optimizer in optimizers]
        shown.begin()
        with protected.open(optimizers), others.watched(apart_from=_all_variables(model)) as moved:
            logs = step(data)
        rejected = (one.rejected_since(then) for one, then in zip(optimizers, seen, strict=True))
        bad = functools.reduce(tf.logical_or, rejected)
        counted = shown.counted(logs)
        state = [one for one, is_state in _variables(model, protected) if is_state]
        _check_nothing_new(model, state, before)
        is_state = set(map(id, state))
        left = [pair for pair in before if id(pair[0]) in is_state]
        # Layers of other models, which the step calls.
        elsewhere = moved.snapshot()
        pairs = zip(elsewhere.variables, elsewhere.values, strict=True)
        left += [pair for pair in pairs if not _is_updated(pair[0], protected, every)]
        if not replicas.in_place() and not tf.executing_eagerly():
            protected.traced_as(tf.compat.v1.get_default_graph())
        weights = [pair for pair in before if id(pair[0]) not in is_state and pair[1].dtype.is_floating]
        assigned = [pair for pair in weights if protected.assigns(pair[0])]

        def put_back() -> dict[str, Any]:
            spoilt, rest = shown.spoilt(left), []
            for variable, value in left:
                own = replicas.own_component(variable)
                # Weights of a frozen layer may be updated, too, by a step that names them.
                kept = [tf.identity(one.iterations) > then for one, then in steps_of if _updates(one, variable)]
                if variable.trainable or kept:
                    own.assign(tf.where(bad & ~tf.reduce_any([False, *kept]), value, own))
                else:
                    rest.append((variable, own, value, ~(bad | spoilt.get(id(variable), False))))
            if rest:
                found = state_to_keep(*zip(*rest, strict=True))
                for (_, own, _, _), value in zip(rest, found, strict=True):
                    own.assign(value)
            for variable, value in assigned:
                own = replicas.own_component(variable)
                # A step that adds a gradient to a weight and takes it off again leaves a NaN where it overflowed.
                lost = tf.math.is_finite(value) & ~tf.math.is_finite(tf.convert_to_tensor(own))
                own.assign(tf.where(bad & lost, value, own))
            return shown.after(counted, bad, tf.reduce_any([False, *spoilt.values()]))

        # A GPU would wait for a branch, XLA gains nothing by it, replicas assign together.
        if replicas.in_place() and not selects_by_default():
            clean = tf.logical_and(~bad, all_finite([variable for variable, _ in left if not variable.trainable]))
            put_back_apart = put_back if tf.distribute.has_strategy() else functools.partial(call_noninlined, put_back)
            renewed = tf.cond(clean, lambda: shown.among(logs) if counted else {}, put_back_apart)
        else:
            renewed = put_back()
        return {**logs, **renewed} if isinstance(logs, dict) else logs

    @functools.wraps(own_reset)
    def reset_metrics() -> None:
        own_reset()
        shown.reset()

    @functools.wraps(own_results)
    def get_metrics_result() -> dict[str, Any]:
        if not tf.executing_eagerly():
            return shown.note(own_results())
        if shown.put_back:
            for optimizer in loss_scale_optimizers(model).values():
                warn_if_stuck(optimizer)
        return shown.note(shown.at_rest())

    setattr(train_step, _MARK, True)
    model.train_step = train_step
    model.reset_metrics = reset_metrics
    model.get_metrics_result = get_metrics_result
    cast_penalties(model)
    model.train_function = None
    return model


def is_protected(model: keras.Model) -> bool:
    """Whether `protect` wraps the train step of this model."""
    return hasattr(model.train_step, _MARK)


def _optimizers(model: keras.Model) -> list[LossScaleOptimizer]:
    found = loss_scale_optimizers(model)
    if not found:
        raise InvalidArgument(
            f"protect: model {model.name!r} has no hs.LossScaleOptimizer to say whether a step was skipped. Pass "
            "one to compile(optimizer=...), or make it an attribute of the model." + not_restored(model)
        )
    return list(found.values())


def _with_its_variables(
    step: Callable, data: Any, model: keras.Model, made: list, tell: Callable[[Any], None]
) -> Callable:
    """Traces the step, which creates its variables before it runs. Their values can then be read before the step.

    A step that runs eagerly is traced once for the metrics of each `compile`, which are then in `made`.
    `tell` is called with the graph.
    """
    # Replicas cannot synchronise in a function inside their own. There Keras builds the model earlier.
    if not replicas.in_place():
        return step
    traced = tf.function(functools.partial(_making_variables_outside, step), autograph=False)
    if not tf.executing_eagerly():
        tell(traced.get_concrete_function(data).graph)
        return traced
    if made != model.metrics:
        # A step that runs eagerly may be impossible to trace.
        with contextlib.suppress(Exception):
            tell(traced.get_concrete_function(data).graph)
        made[:] = model.metrics
    return step


def _making_variables_outside(step: Callable, data: Any) -> Any:
    def create(next_creator: Any, **arguments: Any) -> Any:
        value = arguments["initial_value"]
        if tf.is_tensor(value) and not hasattr(value, "numpy"):
            return next_creator(**arguments)
        with tf.init_scope():
            return next_creator(**arguments)

    with tf.variable_creator_scope(create):
        return step(data)


def _variables(model: keras.Model, protected: ProtectedStep) -> list[tuple[Any, bool]]:
    """The variables of the model and of its layers, each with whether it is a part of the state.

    All are that its layers assign, and all others that no optimizer is known to update.
    """
    assigned = {id(variable): variable for variable in state_of(model)}
    variables = {id(v): v for v in (*model.variables, *model.metrics_variables)} | assigned
    own = [held.optimizer for held in optimizers_of(model) if held.own]
    return [(one, place in assigned or not _is_updated(one, protected, own)) for place, one in variables.items()]


def _all_variables(model: keras.Model) -> list:
    """The variables of a model, of its metrics and of its optimizers."""
    own = [variable for held in optimizers_of(model) for variable in held.optimizer.variables]
    return [*model.variables, *model.metrics_variables, *own]


def _is_updated(variable: Any, protected: ProtectedStep, optimizers: Iterable) -> bool:
    """Whether an optimizer updates the variable: one of these, or any that applied gradients in the step."""
    return protected.updates(variable) or any(_updates(optimizer, variable) for optimizer in optimizers)


def _updates(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer.updates(variable)
    if not optimizer.built:
        return False
    known = built_for(optimizer)
    if known is None:
        raise unsupported("protect", f"does not tell which variables {type(optimizer).__name__} updates.")
    return any(variable is own for own in known)


def _check_nothing_new(model: keras.Model, state: list, before: list) -> None:
    known = {id(variable) for variable, _ in before}
    new = [variable.path for variable in state if id(variable) not in known]
    if new:
        raise InvalidArgument(
            f"protect: the train step of model {model.name!r} made the variables {new}: their values before the step "
            "are unknown and cannot be restored. Make them before fit: call the inner models and layers on one batch, "
            "and the metrics on one pair of targets and predictions."
        )


class Held(NamedTuple):
    """An optimizer, and where a model holds it."""

    path: tuple[str, ...]
    optimizer: keras.optimizers.Optimizer
    own: bool
    """Whether the model holds it otherwise than through a model inside, which may be there for its weights alone."""


def optimizers_of(model: keras.Model) -> list[Held]:
    """Finds every optimizer that is held by the model, its layers, or the models inside, also in lists and dicts."""
    found: dict[int, Held] = {}
    seen = {id(model)}
    waiting: collections.deque = collections.deque([((), model, True)])
    while waiting:
        path, holder, own = waiting.popleft()
        # Attributes first: Keras lists all of them once more in attributes of its own.
        held = sorted(vars(holder).items(), key=lambda item: isinstance(item[1], (list, tuple, set, dict)))
        for name, value in _parts(held):
            if isinstance(value, keras.optimizers.Optimizer):
                found.setdefault(id(value), Held((*path, name), value, own))
            elif id(value) not in seen:
                seen.add(id(value))
                waiting.append(((*path, name), value, own and not isinstance(value, keras.Model)))
    return list(found.values())


def loss_scale_optimizers(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """Finds ours by name, each once: the compiled one, or several as in a GAN.

    Those of compiled models inside count if the model holds one of its own, too.
    """
    held = [each for each in optimizers_of(model) if isinstance(each.optimizer, LossScaleOptimizer)]
    if not any(each.own for each in held):
        return {}
    found: dict[str, LossScaleOptimizer] = {}
    for each in held:
        found[unused("_".join(each.path), found)] = each.optimizer
    return found


def not_restored(model: keras.Model) -> str:
    """A sentence about a class whose models Keras loads without their optimizer, as those of keras-hub; else nothing.

    Keras compiles a loaded model as it was saved unless its class overrides `compile` and says nothing of loading.
    """
    kind = type(model)
    if kind.compile is keras.Model.compile or kind.compile_from_config is not keras.Model.compile_from_config:
        return ""
    return (
        f" {kind.__name__} overrides `compile`, so that Keras does not restore the optimizer from a .keras file. To go "
        "on with a saved run: compile(optimizer=hs.LossScaleOptimizer(...)), then "
        "optimizer.build(model.trainable_variables), then load_weights, which also reads a .keras file."
    )


def _parts(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The optimizers and layers among these values and in their lists and dicts, each with a name."""
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, keras.optimizers.Optimizer):
            yield name, value
        elif isinstance(value, keras.layers.Layer):
            yield value.name if prefix else name, value
        elif isinstance(value, dict):
            yield from _parts(value.items(), f"{name}_")
        elif isinstance(value, (list, tuple, set)):
            yield from _parts(enumerate(value), f"{name}_")
