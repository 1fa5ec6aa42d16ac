"""What forward passes move in Keras layers, whoever owns them: known from the layers called and from the trace."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.assignments import assigned_since
from scaler.backend.graphs import variables_read
from scaler.backend.layers import alive, calls_noted, layers_of, owners_of, state_of
from scaler.backend.variables import is_of_a_scaler
from scaler.errors import ScaleWarning
from scaler.gate.rollback import Snapshot, all_finite


class LayerState:
    """The state of all Keras layers that the forward passes of a step call.

        state = LayerState([model])       # one for a step, as long as it lives
        with state.watched() as moved:    # in each call of the step
            ...                           # the forward and backward pass
        before = moved.snapshot()         # for `rollback`

    A layer's state is what `scaler.state_of` names and, of a class that is not Keras's, its weights, too: its own
    call may assign them. A layer counts once it was called, also in a nested function, a branch or a loop.

    Args:
        layers: Layers known beforehand.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer] = ()):
        self._layers = {id(layer): layer for layer in layers}
        self._spoiled: dict[int, str] | None = None

    def learn(self, graph: Any, apart_from: Iterable) -> None:
        """Learns of the layers whose state a function moves that is traced, and not called yet.

        Args:
            graph: The function's.
            apart_from: Variables that are somebody else's concern.
        """
        left_out = {id(part) for one in apart_from for part in _parts(one)}
        self._layers |= {id(layer): layer for _, layer in _owned(graph, assigned_since(graph, 0), left_out)}

    @contextlib.contextmanager
    def watched(self, *, apart_from: Iterable = ()) -> Iterator[Moved]:
        """Watches the pass that is taken within this context.

        Args:
            apart_from: Variables that are somebody else's concern.
        """
        if self._spoiled is None and tf.executing_eagerly():
            self._spoiled = _spoiled()
        # A tf.function that was traced in an earlier trace of the step calls no layer in this one.
        moved = Moved(self._layers, apart_from)
        with calls_noted(moved.note):
            yield moved

    def check(self, *applied: tf.Tensor) -> None:
        """Warns of state that an eager step has spoiled that was skipped, in a layer that it did not know."""
        if self._spoiled is None or not tf.executing_eagerly() or all(applied):
            return
        new = {key: path for key, path in _spoiled().items() if key not in self._spoiled}
        self._spoiled |= new
        if new:
            warnings.warn(
                f"{next(iter(new.values()))!r}, the state of a layer, is not finite after a skipped step that did not "
                "know the layer. An eager step knows layers that are called themselves, but not in a tf.function that "
                "was traced before.",
                ScaleWarning,
                stacklevel=2,
            )


class Moved:
    """The state of the layers that one forward pass calls, read before each of them runs.

    Args:
        layers: Those known beforehand, by id. Layers that are called are added.
        apart_from: Variables that do not count.
    """

    def __init__(self, layers: dict[int, keras.layers.Layer], apart_from: Iterable):
        self._layers, self._left_out = layers, {id(part) for one in apart_from for part in _parts(one)}
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._start = 0 if self._graph is None else len(self._graph.get_operations())
        self._seen: set[int] = set()
        self._before: list[tuple[Any, tf.Tensor]] = []
        for layer in list(layers.values()):
            self.note(layer)

    def note(self, layer: keras.layers.Layer) -> None:
        """Reads the state of a layer that is called, unless that was done."""
        if id(layer) in self._seen or not layer.built:
            return
        self._layers.setdefault(id(layer), layer)
        inside = layers_of(layer)
        self._seen.update(id(one) for one in inside if one.built)
        users = [one for one in inside if one.built and type(one).__module__.partition(".")[0] != "keras"]
        own_calls = [one.trainable_weights for one in users]
        # The value has to be read where the pass began, ahead of a function, branch or loop that is being traced now.
        with tf.init_scope() if self._graph is None else self._graph.as_default():
            for variable in [*state_of(layer), *(weight for weights in own_calls for weight in weights)]:
                # TensorFlow's own: Keras casts what it reads inside of a layer.
                own = replicas.native(variable)
                if id(own) not in self._left_out:
                    self._left_out.add(id(own))
                    self._before.append((variable, tf.identity(own)))

    def snapshot(self) -> Snapshot:
        """The state that the pass has moved since, with its values before; in eager mode all that it may have moved.

        It warns of state in a graph that no call of a layer told of: what it was before is not known.
        """
        before = self._before
        if self._graph is not None:
            assigned = assigned_since(self._graph, self._start)
            before = [(variable, value) for variable, value in before if _handle(variable) in assigned]
            # Replicas that wait for each other are traced in turns, in one graph.
            known = {id(part) for variable, _ in self._before for part in _parts(variable)} | self._left_out
            unknown = list(_owned(self._graph, assigned, known))
            # The next trace reads it in time.
            self._layers |= {id(layer): layer for _, layer in unknown}
            if unknown:
                warnings.warn(_UNKNOWN.format(unknown[0][0].name.split(":")[0]), ScaleWarning, stacklevel=2)
        return Snapshot(tuple(variable for variable, _ in before), tuple(value for _, value in before))


_UNKNOWN = (
    "A step moves {!r}, the state of a layer, in a tf.function that was traced before the step, or by a layer's `call` "
    "in place of the layer itself: a skipped step cannot put it back. Make the step before the function is traced, "
    "or give it the Python function, as `function.python_function`; call the layer itself."
)


def _owned(graph: Any, assigned: set[int], left_out: set[int]) -> Iterator[tuple[tf.Variable, keras.layers.Layer]]:
    """The state of layers, each with a layer that holds it, among the variables that a graph assigns."""
    others = (one for one in variables_read(graph).values() if not is_of_a_scaler(one))
    read = {id(one): one for one in others if id(one) not in left_out}
    return ((read[key], layer) for key, layer in owners_of(o for o in read.values() if _handle(o) in assigned).items())


def _spoiled() -> dict[int, str]:
    """The state of living layers that is not finite, in eager mode: names, by the ids of variables."""
    states = (
        replicas.native(one) for layer in next(alive(keras.layers.Layer)) if layer.built for one in state_of(layer)
    )
    return {id(one): one.name for one in map(replicas.native, states) if not all_finite([one])}


def _handle(variable: Any) -> int:
    return id(replicas.own_part(variable).handle)


def _parts(variable: Any) -> tuple:
    own = replicas.native(variable)
    return (own, *getattr(own, "values", ()))
