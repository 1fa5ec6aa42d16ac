"""Which tensors of a model are watched, by layer."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Collection as Container
from typing import Any

import keras
import tensorflow as tf

from scaler.checks import check_count
from scaler.errors import InvalidArgument
from scaler.layers import layers_by_path
from scaler.observe.probes import ACTIVATIONS, GRADIENTS, Collection, current, is_probed

KINDS = (ACTIVATIONS, GRADIENTS, "weight_gradients", "weights", "updates", "slots")
"""What can be watched, in the order of the rows."""
DEFAULT_KINDS = KINDS[:3]


class Watch:
    """Which tensors of a model's steps are measured: what `watch` makes, and `loops.TrainStep(probes=...)` takes.

    Attributes:
        model: The model.
        every: The counts are taken on each step whose number, counted in attempts, is a multiple of this.
        kinds: What is measured, of `KINDS`.
    """

    def __init__(self, model: keras.Model, layers: Sequence | None, every: int, kinds: Sequence[str]):
        self.model = model
        self.every = int(every)
        self.kinds = tuple(kind for kind in KINDS if kind in kinds)
        self._asked = None if layers is None else list(layers)
        self._only: frozenset[str] | None = None
        self._names: list[str] | None = None
        self._left_out: list[str] = []
        self._dtypes: dict[str, tuple[str, ...]] = {}
        self._open, self._lock = 0, threading.Lock()
        self._put_back: list[Callable[[], None]] = []

    @property
    def names(self) -> list[str]:
        """The rows that a step measures, such as "activations/dense", in their order; known after the first trace.

        Raises:
            InvalidArgument: Before.
        """
        if self._names is None:
            raise InvalidArgument("Watch.names: no step with these probes was traced yet. Take one first.")
        return list(self._names)

    @property
    def left_out(self) -> list[str]:
        """Layers and probes of which nothing was seen, because they run in a loop, a branch or a function."""
        return list(self._left_out)

    @property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """For each layer and probe the dtypes of its tensors in the last trace, such as ("float16",)."""
        return dict(self._dtypes)

    def only(self, names: Container[str], kinds: Sequence[str] | None = None) -> Watch:
        """The same watch of fewer: of the layers and hand-set probes with these names, and of these kinds.

        Args:
            names: Such as "dense", without the kind.
            kinds: As in `watch`; the same kinds if not given.
        """
        fewer = Watch(self.model, self._asked, self.every, self.kinds if kinds is None else _checked_kinds(kinds))
        fewer._only = frozenset(names) if self._only is None else self._only & frozenset(names)
        return fewer

    def layers(self) -> dict[str, keras.layers.Layer]:
        """The layers that are watched, by path. Of a subclass those that its attributes hold by now.

        Raises:
            InvalidArgument: If a layer that was asked for is not in the model.
        """
        paths = layers_by_path(self.model)
        if self._asked is None:
            return {path: layer for path, layer in paths.items() if not _shows_others(layer)}
        wanted = [_path(paths, each) for each in self._asked]
        return {path: layer for path, layer in paths.items() if path in wanted}

    @contextlib.contextmanager
    def collect(self) -> Iterator[Collection]:
        """The forward pass of a step: inside of it, the watched layers and probes give their tensors out.

            with tf.GradientTape() as tape, watch.collect() as collection:
                loss = ...
            gradients = tape.gradient(loss, weights)
            counts, amax = observe.measured(collection.rows())

        Between its begin and its end each layer's `call` is another one; afterwards it is what it was.
        """
        layers = self.layers() if {ACTIVATIONS, GRADIENTS} & {*self.kinds} else {}

        def takes(name: str, by_layer: bool) -> bool:
            if not by_layer and name in layers:
                raise InvalidArgument(f"probe(x, {name!r}): a layer has this name already: expected another one.")
            return self._only is None or name in self._only

        with self._watched(layers):
            collection = Collection(self.kinds, takes)
            with collection.forward():
                yield collection
            self._dtypes = collection.dtypes

    def found(self, names: Sequence[str], collection_left_out: Sequence[str], seen: Sequence[str]) -> None:
        """Remembers the rows of a step that was traced, and says once which layers show nothing.

        Args:
            names: The rows.
            collection_left_out: The names of probes in other graphs.
            seen: All names that were probed.
        """
        wanted = self.layers() if self._asked is not None and {ACTIVATIONS, GRADIENTS} & {*self.kinds} else ()
        asked = [path for path in wanted if path not in seen and (self._only is None or path in self._only)]
        missing = [*collection_left_out, *asked]
        news = [name for name in missing if name not in self._left_out]
        self._names, self._left_out = list(names), missing
        if news:
            warnings.warn(
                f"observe.watch shows nothing of {', '.join(map(repr, news))}: what runs in a loop, a branch or a "
                "function of its own cannot be seen from outside, and what has no float16, bfloat16 or float32 output "
                "is not counted. An RNN with unroll=True shows its cell.",
                UserWarning,
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _watched(self, layers: dict[str, keras.layers.Layer]) -> Iterator[None]:
        # Replicas take turns in one step, each in a thread, and share the layers: the first opens, the last closes.
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._put_back = [_replace_call(layer, path) for path, layer in layers.items()]
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    for put_back in self._put_back:
                        put_back()


def watch(
    model: keras.Model,
    layers: Sequence[keras.layers.Layer | str] | None = None,
    every: int = 1,
    kinds: Sequence[str] = DEFAULT_KINDS,
) -> Watch:
    """Watches the tensors of a model's training steps: `loops.TrainStep(model, ..., probes=observe.watch(model))`.

    By layer, also in nested models: a layer's row holds all of its float outputs, of all of its calls in a step. Names
    are paths: "dense", "encoder/dense"; the model itself, where it is a subclass, has its own name. What a `probe` in
    the model sees is watched as well.

    The kinds:

    | kind | what | one row for each |
    |---|---|---|
    | `activations` | outputs of layers | layer, probe |
    | `activation_gradients` | their gradients, multiplied by the loss scale | layer, probe |
    | `weight_gradients` | gradients as they come from the tape, multiplied by the loss scale | weight with a gradient |
    | `weights` | the model's trainable variables, before the step | trainable variable |
    | `updates` | what the step added, in float32: to the master, where there is one; 0 on a skip | the same |
    | `slots` | the optimizer's float variables after the step, without its learning rate | variable |

    A gradient is that of one replica and one micro-batch, of its share of the mean loss. What is computed again in the
    backward pass, as with `tf.recompute_grad`, shows no gradient.

    Args:
        model: A Keras model: Sequential, functional or a subclass.
        layers: Layers of the model or their names or paths; all if not given, but for models that only call their
            layers one after another.
        every: Histograms are counted on each `every`-th attempted step, and are zeros on others.
        kinds: What to measure.

    Raises:
        InvalidArgument: For arguments that cannot work. A layer that is not in the model is an error when the first
            step is traced, since subclasses make layers late.
    """
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"watch(model={model!r}): expected a keras.Model.")
    if layers is not None and (
        isinstance(layers, str)
        or not isinstance(layers, Sequence)
        or not all(isinstance(each, (str, keras.layers.Layer)) for each in layers)
    ):
        raise InvalidArgument(f"watch(layers={layers!r}): expected a list of layers or of their names, or None.")
    check_count("every", every, 10)
    return Watch(model, layers, every, _checked_kinds(kinds))


def _checked_kinds(kinds: Sequence[str]) -> Sequence[str]:
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise InvalidArgument(f"watch(kinds={kinds!r}): expected a list of {', '.join(KINDS)}.")
    return kinds


def _path(paths: dict[str, keras.layers.Layer], asked: Any) -> str:
    if isinstance(asked, str):
        found = [path for path in paths if path == asked] or [p for p, layer in paths.items() if layer.name == asked]
    else:
        found = [path for path, layer in paths.items() if layer is asked]
    if len(found) != 1:
        why = f"the paths {', '.join(found)} end so: name one of them" if found else f"it has {', '.join(paths)}"
        raise InvalidArgument(f"watch(layers=[{asked!r}]): expected a layer of the model; {why}.")
    return found[0]


def _shows_others(layer: keras.layers.Layer) -> bool:
    """Whether its outputs are those of layers in it, or its inputs: a Sequential, a functional model, an Input."""
    of_keras = type(layer).call.__module__.partition(".")[0] == "keras"
    return isinstance(layer, keras.layers.InputLayer) or (isinstance(layer, keras.Model) and of_keras)


def _replace_call(layer: keras.layers.Layer, path: str) -> Callable[[], None]:
    """Has a layer show its outputs, and returns what undoes it."""
    call = layer.call
    own = vars(layer).get("call")

    @functools.wraps(call)
    def watched(*arguments: Any, **named: Any) -> Any:
        outputs, collection = call(*arguments, **named), current()
        if collection is None:
            return outputs
        return tf.nest.map_structure(
            lambda one: collection.see(one, path, by_layer=True) if is_probed(one) else one, outputs
        )

    def put_back() -> None:
        if own is None:
            object.__delattr__(layer, "call")
        else:
            object.__setattr__(layer, "call", own)

    # Not as Keras sets attributes: it would keep track of what the function holds.
    object.__setattr__(layer, "call", watched)
    return put_back
