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
from scaler.backend.layers import calls_noted, layers_of, owners_of, state_of
from scaler.backend.variables import owner_of
from scaler.errors import ScaleWarning
from scaler.gate.rollback import Snapshot


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

    @contextlib.contextmanager
    def watched(self, *, apart_from: Iterable = ()) -> Iterator[Moved]:
        """Watches the pass that is taken within this context.

        Args:
            apart_from: Variables that are somebody else's concern.
        """
        # A tf.function that was traced in an earlier trace of the step calls no layer in this one.
        moved = Moved(self._layers, apart_from)
        with calls_noted(moved.note):
            yield moved


class Moved:
    """The state of the layers that one forward pass calls, read before each of them runs.

    Args:
        layers: Those known beforehand, by id. Layers that are called are added.
        apart_from: Variables that do not count.
    """

    def __init__(self, layers: dict[int, keras.layers.Layer], apart_from: Iterable):
        self._layers, self._left_out = layers, {id(replicas.native(one)) for one in apart_from}
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
        own_calls = [one.trainable_weights for one in inside if one.built and not _is_of_keras(one)]
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

        It warns of state that a function moves which was traced before the step: what it was is not known.
        """
        before = self._before
        if self._graph is not None:
            assigned = assigned_since(self._graph, self._start)
            before = [(variable, value) for variable, value in before if _handle(variable) in assigned]
            self._warn_of_others(assigned)
        return Snapshot(tuple(variable for variable, _ in before), tuple(value for _, value in before))

    def _warn_of_others(self, assigned: set[int]) -> None:
        known = {_handle(variable) for variable, _ in self._before} | self._left_out
        read = [one for one in variables_read(self._graph).values() if one.dtype.is_floating and owner_of(one) is None]
        others = {id(one): one for one in read if _handle(one) in assigned and not known & {id(one), _handle(one)}}
        for key, layer in owners_of(others.values()).items():
            # The next trace reads it in time.
            self._layers.setdefault(id(layer), layer)
            warnings.warn(
                f"A tf.function moves {others[key].name.split(':')[0]!r}, the state of a layer, and was traced before "
                "this step: a skipped step cannot put it back, and one bad batch may leave it NaN for good. Make the "
                "step first, or give it the Python function, as `function.python_function`.",
                ScaleWarning,
                stacklevel=2,
            )
            return


def _handle(variable: Any) -> int:
    return id(replicas.own_part(variable).handle)


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"
