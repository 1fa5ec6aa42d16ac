"""The layers of a Keras model: which are called, how they are connected, who owns a variable, what Keras stores there.

Every layer is called through `keras.Operation.__call__`, once it is built. Only while `calls_noted` is open another
function stands in its place.

get_global_attribute   holds the call that is running   absent: `UnsupportedVersion` when a layer is to get scales
                                                          from past steps, before anything has changed
_tracker               refuses new parts of a layer     absent: the same
                         that is built
_keras_logits   what a softmax or sigmoid was computed from   absent: one in float16 is known by its operation, and it
                                                              is nowhere, and so not lost by a copy
_keras_mask     which of a layer's steps are padding          absent: it is nowhere, and so not lost by a copy
_direction      whether a metric should be large or small     absent: the direction is unknown
_aggregate_additional_loss   what `compute_loss` adds of      absent: Keras raises its TypeError where a penalty is in
                             a penalty of a model             16 bits and the loss is not
_inbound_nodes    the calls of an operation                  absent: `UnsupportedVersion` from unit_scaled, before
_keras_history    the call that a symbolic tensor is from      anything has changed
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras

from scaler.backend import replicas
from scaler.backend.graphs import reached
from scaler.backend.versions import unsupported

_NOTES: contextvars.ContextVar[tuple[Callable, ...]] = contextvars.ContextVar("calls_noted", default=())
_LOCK = threading.Lock()
_OPEN: list[Callable] = []
"""What each `calls_noted` that is open found in the place of `keras.Operation.__call__`."""


def layers_of(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The model itself and every layer in it, each once, also those in lists, dicts and wrappers.

    Of a subclass it has those that its attributes hold by now.
    """
    return list(layers_by_path(model).values())


def layers_by_path(model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """The model and every layer in it, by the names on the way to it: "dense", "encoder/attention/query".

    The model itself is first, under its own name, which is no part of the other paths. A layer that is held in several
    places has the shortest of its paths; of several that would share one path, the later ones get ":2", ":3", ....

    Args:
        model: A model or a layer.
    """
    found: dict[str, keras.layers.Layer] = {model.name: model}
    seen = {id(model)}
    waiting = collections.deque([("", model)])
    while waiting:
        path, holder = waiting.popleft()
        # Keras gives a Sequential a model inside, of the same layers, which has a dtype of its own.
        held = holder.layers if isinstance(holder, keras.Sequential) else list(vars(holder).values())
        for layer in _layers_among(held):
            if id(layer) not in seen:
                seen.add(id(layer))
                own = unused(f"{path}{layer.name}", found)
                found[own] = layer
                waiting.append((f"{own}/", layer))
    return found


@contextlib.contextmanager
def calls_noted(note: Callable[[keras.layers.Layer], None]) -> Iterator[None]:
    """Calls `note` with each built layer that this thread calls within this context, just before the layer runs."""
    token = _NOTES.set((*_NOTES.get(), note))
    with _LOCK:
        if not _OPEN:
            _note_calls()
        _OPEN.append(note)
    try:
        yield
    finally:
        _NOTES.reset(token)
        with _LOCK:
            _OPEN.remove(note)
            if not _OPEN:
                keras.Operation.__call__ = keras.Operation.__call__.__wrapped__


def _note_calls() -> None:
    """Puts a function in the place of `keras.Operation.__call__`."""
    call = keras.Operation.__call__

    @functools.wraps(call)
    def noted(self: keras.Operation, *arguments: Any, **named: Any) -> Any:
        if isinstance(self, keras.layers.Layer):
            for note in _NOTES.get():
                note(self)
        return call(self, *arguments, **named)

    keras.Operation.__call__ = noted


@contextlib.contextmanager
def calls_through(layers: Iterable[Any], around: Callable[..., Any]) -> Iterator[None]:
    """Within this context each call of these layers is `around(layer, call, *arguments, **named)`.

    Args:
        layers: Keras layers, or other operations of a functional model.
        around: Gets the layer, its own `call`, and what the layer is called with. It returns the outputs.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(set_method(layer, "call", _through(layer, layer.call, around)))
        yield


def _through(layer: Any, call: Callable, around: Callable) -> Callable:
    @functools.wraps(call)  # Keras reads the signature.
    def through(*arguments: Any, **named: Any) -> Any:
        return around(layer, call, *arguments, **named)

    return through


def set_method(layer: Any, name: str, method: Callable) -> Callable[[], None]:
    """Gives one layer another method, and returns what puts back the one that it had: its class's, or its own."""
    own = vars(layer).get(name)
    # Not as Keras sets attributes: it would keep track of what the function holds.
    object.__setattr__(layer, name, method)
    if own is None:
        return lambda: object.__delattr__(layer, name)
    return lambda: object.__setattr__(layer, name, own)


def state_of(model: keras.layers.Layer) -> list[Any]:
    """What the forward pass of a model moves by itself, for `snapshot`: once the model is built.

    The non-trainable variables, and what Keras does not count among them: a stateful RNN keeps its states beside the
    model's variables, and SpectralNormalization assigns a trainable weight in every forward pass.

    Args:
        model: A Keras model or layer.
    """
    found = list(model.non_trainable_variables)
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.states is not None:
            found += keras.tree.flatten(layer.states)
        if isinstance(layer, keras.layers.SpectralNormalization):
            found.append(layer.kernel)
    return list({id(variable): variable for variable in found}.values())


def owners_of(variables: Iterable[Any]) -> dict[int, keras.layers.Layer]:
    """The living Keras layer whose state holds each of these variables of TensorFlow, by the variable's id.

    Variables that no layer holds are left out: your own, metrics, those of optimizers.
    """
    wanted = {id(variable): variable for variable in variables}
    found: dict[int, keras.layers.Layer] = {}
    for layers in alive(keras.layers.Layer) if wanted else ():
        for layer in layers:
            natives = map(replicas.native, state_of(layer)) if layer.built else ()
            parts = [part for one in natives for part in (one, *getattr(one, "values", ()))]
            found |= {id(part): layer for part in parts if id(part) in wanted}
        # Among objects that `gc.freeze` hid only those are sought that a layer made itself, under its own name.
        if not any("/" in variable.name for key, variable in wanted.items() if key not in found):
            break
    return found


def alive(*kinds: type) -> Iterator[list[Any]]:
    """The living Python objects of some classes; then, if `gc.freeze` hid some from Python's list, all of them."""
    yield _listed(kinds)
    if gc.get_freeze_count():
        gc.unfreeze()
        objects = _listed(kinds)
        # Hiding them again hides every other object, too.
        gc.freeze()
        yield objects


def _listed(kinds: Iterable[type]) -> list[Any]:
    """The objects of some classes in Python's list of all.

    That list holds every object, also a tuple that another thread is making: the thread fails with a SystemError if it
    goes on meanwhile. So each list is made, searched and dropped within one call that runs no Python, and the collector
    is off, which would run some.
    """
    classes, collects = set(map(id, reached(kinds, type.__subclasses__))), gc.isenabled()
    gc.disable()
    try:
        return [one for generation in range(3) for one in _listed_in(generation, classes)]
    finally:
        if collects:
            gc.enable()


def _listed_in(generation: int, classes: set[int]) -> list[Any]:
    def objects() -> Iterator[Any]:
        return itertools.chain.from_iterable(itertools.starmap(gc.get_objects, [(generation,)]))

    # Not isinstance, which reads `__class__` and may run code of foreign objects.
    chosen = map(classes.__contains__, map(id, map(type, objects())))
    # The second list ends with the first one. `None` is never chosen: it lets both come to their end, and be dropped.
    return list(itertools.compress(itertools.chain(objects(), itertools.repeat(None)), chosen))


def unused(path: str, taken: dict) -> str:
    """The path, with ":2", ":3", ... behind it if it is taken."""
    number, free = 1, path
    while free in taken:
        number += 1
        free = f"{path}:{number}"
    return free


def _layers_among(values: Iterable) -> Iterator[keras.layers.Layer]:
    """The layers in nested lists and dicts."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, keras.layers.Layer):
            yield value
        elif isinstance(value, (list, tuple, set, dict)):
            yield from _layers_among(value)


def in_training() -> bool:
    """Whether the layer that is being called is trained: what `training=True` of the outermost call says."""
    context = _state()("current_call_ctx")
    return bool(getattr(context, "training", None))


@contextlib.contextmanager
def open_to_variables(layer: Any) -> Iterator[None]:
    """Lets a layer that is built make further variables.

    Raises:
        UnsupportedVersion: If Keras has no way to, or does not say later which calls are trained.
    """
    tracker: Any = getattr(layer, "_tracker", None)
    if not hasattr(tracker, "unlock") or not hasattr(tracker, "locked"):
        raise unsupported("emulated", "has another way to refuse variables of a layer that is built.")
    _state()
    before = tracker.locked
    tracker.unlock()
    try:
        yield
    finally:
        if before:
            tracker.lock()


def _state() -> Any:
    """Keras's own look-up of global state."""
    try:
        from keras.src.backend.common.global_state import get_global_attribute
    except ImportError as error:
        raise unsupported("emulated", "does not say whether a call of a layer is training.") from error
    return get_global_attribute


def is_softmax_or_sigmoid(tensor: Any) -> bool:
    """Whether Keras knows the tensor as the result of a softmax or sigmoid, with the logits behind it."""
    return hasattr(tensor, "_keras_logits")


def direction_of(metric: Any) -> str | None:
    """Returns "up" for a metric that should be large, "down" for one that should be small, None if unknown."""
    return getattr(metric, "_direction", None)


def cast_penalties(model: keras.Model) -> None:
    """Has `compute_loss` of a model add penalties in the dtype of Keras's losses, also those computed in 16 bits."""
    own = getattr(model, "_aggregate_additional_loss", None)
    if own is not None:
        model._aggregate_additional_loss = lambda loss: own(keras.ops.cast(loss, keras.config.floatx()))


def carry(source: Any, copy: Any, through: Callable[[Any], Any] = lambda tensor: tensor) -> Any:
    """Gives a copy of a layer's output what Keras stored on the original, and returns the copy.

    Args:
        source: The original.
        copy: The copy.
        through: What the copy's logits are made by from the original's, since a loss may be computed from them.
    """
    if hasattr(source, "_keras_logits"):
        copy._keras_logits = through(source._keras_logits)
    if hasattr(source, "_keras_mask"):
        copy._keras_mask = source._keras_mask
    return copy


class Call(NamedTuple):
    """One call of a layer, or of another operation, in a model.

    Attributes:
        operation: The layer.
        sources: Of each symbolic tensor that it is given, the place of the call that made it.
    """

    operation: Any
    sources: tuple[int, ...]


def calls_of(model: keras.Model) -> tuple[list[Call], list[int]]:
    """The calls of a model, each behind those that it depends on, and the places of those that make its outputs.

    Args:
        model: Functional or Sequential, and built.

    Raises:
        UnsupportedVersion: If Keras does not say how layers are connected.
    """
    places: dict[tuple[int, int], int] = {}
    calls: list[Call] = []
    waiting = [_made_by(tensor) for tensor in model.outputs]
    while waiting:
        operation, number = waiting[-1]
        before = [_made_by(tensor) for tensor in _node(operation, number).input_tensors]
        missing = [each for each in before if _key(each) not in places]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if _key((operation, number)) not in places:
            places[_key((operation, number))] = len(calls)
            calls.append(Call(operation, tuple(places[_key(each)] for each in before)))
    return calls, [places[_key(_made_by(tensor))] for tensor in model.outputs]


def _made_by(tensor: Any) -> tuple[Any, int]:
    """The operation that made a symbolic tensor, and the number of its call."""
    history = getattr(tensor, "_keras_history", None)
    if history is None:
        raise unsupported("unit_scaled", "does not say which layer a symbolic tensor comes from.")
    return history.operation, history.node_index


def _node(operation: Any, number: int) -> Any:
    """One call of an operation."""
    nodes = getattr(operation, "_inbound_nodes", None)
    if nodes is None:
        raise unsupported("unit_scaled", "does not say what a layer is called with.")
    return nodes[number]


def _key(call: tuple[Any, int]) -> tuple[int, int]:
    """A call as a key of a dict."""
    return id(call[0]), call[1]
