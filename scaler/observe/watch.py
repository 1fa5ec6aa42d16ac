"""Which tensors of a model are watched, by layer."""

from __future__ import annotations

import contextlib
import numbers
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard

import keras
import tensorflow as tf

from scaler.backend.attention import LAYERS, Scores, show_scores
from scaler.backend.layers import calls_through, layers_by_path, layers_of
from scaler.errors import InvalidArgument
from scaler.observe.probes import ACTIVATIONS, GRADIENTS, Collection, current, inside, is_probed

KINDS = (ACTIVATIONS, GRADIENTS, "weight_gradients", "weights", "updates", "slots")
"""Which tensors can be watched, in the order of the rows."""
DEFAULT_KINDS = KINDS[:3]
ATTENTION, UPDATE_RMS, NOISE_SCALE = "attention", "update_rms", "noise_scale"
GAUGES = {
    ATTENTION: ("attention_logit", "attention_entropy"),
    UPDATE_RMS: ("update_rms", "update_ratio"),
    NOISE_SCALE: ("noise_scale",),
}
"""Ready probes by their kind, which measure a number of each layer or step: the outputs of a `TrainStep` with each."""


_Layers = Mapping[str, keras.layers.Layer]


class Watch:
    """Which tensors of a model's steps are measured: what `watch` makes, and `loops.TrainStep(probes=...)` takes.

    Attributes:
        model: The model.
        every: A step is measured if its number, counted in attempts, is a multiple of this.
        kinds: What is measured, of `KINDS` and `GAUGES`.
    """

    def __init__(self, model: keras.Model, layers: Sequence | None, every: int, kinds: Sequence[str]):
        self.model = model
        self.every = int(every)
        self.kinds = tuple(kind for kind in (*KINDS, *GAUGES) if kind in kinds)
        self._asked = None if layers is None else list(layers)
        self._only: frozenset[str] | None = None
        self._only_weights_of: frozenset[str] | None = None
        self._names: list[str] | None = None
        self._gauges: dict[str, list[str]] = {}
        self._left_out: list[str] = []
        self._dtypes: dict[str, tuple[str, ...]] = {}
        self._open, self._lock = 0, threading.Lock()
        self._seen = contextlib.ExitStack()

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
    def gauges(self) -> dict[str, list[str]]:
        """For each output of `GAUGES` what its numbers belong to, such as paths of layers; known after the first trace.

        Raises:
            InvalidArgument: Before.
        """
        if self._names is None:
            raise InvalidArgument("Watch.gauges: no step with these probes was traced yet. Take one first.")
        return {output: list(names) for output, names in self._gauges.items()}

    @property
    def left_out(self) -> list[str]:
        """Layers and probes of which nothing was seen; a warning said why."""
        return list(self._left_out)

    @property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """For each layer and probe the dtypes of its tensors in the last trace, such as ("float16",)."""
        return dict(self._dtypes)

    def only(self, names: Sequence[str] | Set[str], kinds: Sequence[str] | None = None) -> Watch:
        """The same watch of fewer: of the layers and hand-set probes with these names, and of these kinds.

        Of weights those of these layers are left, and of the layers in them; of attention that of these layers.

        Args:
            names: Such as "dense", without the kind.
            kinds: As in `watch`; the same kinds if not given.

        Raises:
            InvalidArgument: For arguments that cannot work. A name that neither a layer nor a probe has is an error
                when the first step is traced, since a model's probes are not known before.
        """
        if not _is_list_of_names(names) or not names:
            raise InvalidArgument(
                f"Watch.only({names!r}): expected a list of names of layers and probes, such as ['dense']."
            )
        gone = [] if self._only is None else [name for name in names if name not in self._only]
        if gone:
            raise InvalidArgument(f"Watch.only({names!r}): {_quoted(gone)} was taken out of this watch before.")
        return self._fewer(names, frozenset(names), kinds)

    def part(self, names: Iterable[str], kinds: Sequence[str]) -> Watch:
        """Some rows of this watch: the layers and probes with these names, and each of the other kinds as a whole.

        Args:
            names: Of the rows of activations and their gradients; may be empty.
            kinds: As in `watch`.
        """
        return self._fewer(names, self._only_weights_of, kinds)

    def _fewer(self, names: Iterable[str], weights_of: frozenset[str] | None, kinds: Sequence[str] | None) -> Watch:
        fewer = Watch(self.model, self._asked, self.every, self.kinds if kinds is None else _checked_kinds(kinds))
        fewer._only, fewer._only_weights_of = frozenset(names), weights_of
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

    def holds(self) -> Callable[[Any], bool]:
        """Whether rows of weights, of their gradients, updates and slots are made of a variable, as a function of it.

        Of all, unless the watch is one of some layers: then of their variables and of those of the layers in them.
        """
        layers = None if self._asked is None else list(self.layers().values())
        chosen = [] if layers is None else [_variables(layers)]
        if self._only_weights_of is not None:
            paths = layers_by_path(self.model)
            chosen.append(_variables([layer for path, layer in paths.items() if path in self._only_weights_of]))
        return lambda variable: all(id(variable) in ids for ids in chosen)

    @contextlib.contextmanager
    def collect(self, beside: Sequence[Collection] | None = None) -> Iterator[Collection]:
        """The forward pass of a step: inside of it, the watched layers and probes give their tensors out.

            with tf.GradientTape() as tape, watch.collect() as collection:
                loss = ...
            gradients = tape.gradient(loss, weights)
            counts, amax = observe.measured(collection.rows())

        It takes activations and their gradients, in each call: the other kinds, and `every`, are for a `TrainStep`.
        What it cannot see it warns of once, when it ends, and keeps in `left_out`. Between its begin and its end each
        layer's `call` is another one; afterwards it is what it was.

        Args:
            beside: For a pass of several models, each with a watch: the collections that are open by now, none for the
                first. Each sees its own model's layers, and what is probed by hand in them; a probe outside of all is
                seen by all.

        Raises:
            InvalidArgument: If another collection is open, and for names that the model does not have.
        """
        layers = self.layers() if {ACTIVATIONS, GRADIENTS} & {*self.kinds} else {}
        attend = self._attention_layers() if ATTENTION in self.kinds else {}

        def takes(name: str, by_layer: bool) -> bool:
            if not by_layer and name in layers:
                raise InvalidArgument(f"probe(x, {name!r}): a layer has this name already: expected another one.")
            return self._only is None or name in self._only

        known = layers_by_path(self.model)
        # With one collection no one else could own what is probed by hand.
        others = [] if beside is None else [one for path, one in known.items() if path not in layers]
        with self._watched(layers, attend, [one for one in others if not _shows_others(one)]):
            collection = Collection(self.kinds, takes, self, frozenset(map(id, known.values())))
            with collection.forward(beside or ()):
                yield collection
            self._dtypes = collection.dtypes
        self._look_back(collection, layers)

    def _attention_layers(self) -> dict[str, keras.layers.Layer]:
        """The layers whose logits are to be seen, by path; says once of which others nothing is shown."""
        only = self._only_weights_of
        layers = {path: one for path, one in self.layers().items() if only is None or path in only}
        shown = {path: one for path, one in layers.items() if isinstance(one, LAYERS)}
        called_so = [path for path, one in layers.items() if "attention" in type(one).__name__.lower()]
        hidden = [p for p in called_so if not any(isinstance(one, LAYERS) for one in layers_of(layers[p]))]
        how = f"{_ONLY_THESE}. Show those of another layer with hs.observe.probe(logits, name)."
        self.leave_out([f"{ATTENTION}/{path}" for path in hidden], how)
        if not shown and not hidden:
            self.leave_out([ATTENTION], f"{_ONLY_THESE}, and the watched layers have none of them.")
        return shown

    def found(self, names: Sequence[str], gauges: Mapping[str, Sequence[str]]) -> None:
        """Remembers the rows of a step that was traced, and what the numbers of each gauge belong to."""
        self._names = list(names)
        self._gauges = {output: list(of) for output, of in gauges.items()}

    def _look_back(self, collection: Collection, layers: dict[str, keras.layers.Layer]) -> None:
        """Says once of which layers and probes a forward pass showed nothing, and why."""
        known = [*layers_by_path(self.model), *sorted(collection.called)]
        nowhere = sorted((self._only or frozenset()) - {*known})
        if nowhere:
            raise InvalidArgument(
                f"Watch.only([{_quoted(nowhere)}]): expected names of layers or probes of the model; it has "
                f"{', '.join(dict.fromkeys(known))}."
            )
        if not {ACTIVATIONS, GRADIENTS, ATTENTION} & {*self.kinds}:
            return
        self.leave_out(collection.left_out, _ELSEWHERE)
        if not layers:
            return
        wanted = self._only if self._only is not None else layers if self._asked is not None else ()
        unseen = [path for path in sorted(wanted) if path not in collection.names]
        self.leave_out(
            [path for path in unseen if path in collection.called], "it has no float16, bfloat16 or float32 output."
        )
        uncalled = [path for path in unseen if path not in collection.called]
        self.leave_out([path for path in uncalled if path in layers], "in this forward pass it is never called.")
        self.leave_out(
            [path for path in uncalled if path not in layers],
            "its outputs are not watched. Name it, or the layers in it, in watch(layers=[...]).",
        )

    def leave_out(self, names: Sequence[str], why: str) -> None:
        """Warns once that nothing is shown of these layers, probes or variables, and why."""
        news = [name for name in names if name not in self._left_out]
        self._left_out += news
        if news:
            # Of no line: those that the caller has here are of functions that AutoGraph wrote.
            warnings.warn_explicit(
                f"observe.watch shows nothing of {_quoted(news)}: {why}", UserWarning, "<observe.watch>", 0
            )

    @contextlib.contextmanager
    def _watched(self, layers: _Layers, attend: _Layers, marked: Sequence[keras.layers.Layer]) -> Iterator[None]:
        """Has layers say that they are called, and show their outputs or their logits."""
        paths = {id(layer): path for path, layer in layers.items()}

        def see(layer: keras.layers.Layer, call: Callable, /, *arguments: Any, **named: Any) -> Any:
            with inside(layer):
                outputs = call(*arguments, **named)
            collection, path = current(self), paths.get(id(layer))
            if collection is None or path is None:
                return outputs
            collection.called.add(path)
            return tf.nest.map_structure(
                lambda one: collection.see(one, path, by_layer=True) if is_probed(one) else one, outputs
            )

        # Replicas take turns in one step, each in a thread, and share the layers: the first opens, the last closes.
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._seen.enter_context(calls_through([*layers.values(), *marked], see))
                for path, layer in attend.items():
                    self._seen.callback(self._show_scores(layer, path))
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._seen.close()

    def _show_scores(self, layer: keras.layers.Layer, path: str) -> Callable[[], None]:
        """Has an attention layer show its logits, and returns what undoes it."""

        def see(scores: Callable[[], Scores]) -> None:
            collection = current(self)
            if collection is not None:
                collection.see_scores(scores, path)

        return show_scores(layer, see, lambda why: self.leave_out([f"{ATTENTION}/{path}"], why))


_ONLY_THESE = "only keras.layers.MultiHeadAttention and GroupQueryAttention show their logits"
_ELSEWHERE = (
    "what runs in a loop, a branch or a function of its own cannot be seen from outside. An RNN with unroll=True shows "
    "its cell."
)


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

    - `activations`: outputs of layers; a row for each layer and each probe.
    - `activation_gradients`: their gradients, multiplied by the loss scale; the same rows.
    - `weight_gradients`: gradients as they come from the tape, multiplied by the loss scale; a row for each weight that
      has one.
    - `weights`: the model's trainable variables, before the step; a row for each.
    - `updates`: what the step added, in float32: to the master, where there is one; 0 on a skip; the same rows.
    - `slots`: the optimizer's float variables after the step, without its learning rate; a row for each.

    Ready probes, which measure numbers in the place of tensors, see `GAUGES`. They are kinds, too:

    - `attention`: of each `keras.layers.MultiHeadAttention` and `GroupQueryAttention` the largest logit and the mean
      entropy, as in `scaler.observe.Attention`.
    - `update_rms`: of each layer the root mean square of what the step added to its weights, and its ratio to that of
      the weights before. Shazeer and Stern 2018, "Adafactor", arXiv:1804.04235, clip updates by it; a ratio of about
      0.001 is a usual rule of thumb.
    - `noise_scale`: what the simple noise scale is computed from, see `loops.observe.noise_scale`: for a step with
      micro-batches or several replicas.

    A gradient is that of one replica and one micro-batch, of its share of the mean loss. What is computed again in the
    backward pass, as with `tf.recompute_grad`, shows no gradient. A variable that takes its gradient as its value, as
    in Keras's float8 layers, has no rows, and counts in no number: see `scaler.gradients.overwrites`.

    Args:
        model: A Keras model: Sequential, functional or a subclass.
        layers: Layers of the model or their names or paths; all if not given, but for models that only call their
            layers one after another.
            Rows of weights are then those of these layers and of the layers in them.
        every: A step is measured if its number, counted in attempts, is a multiple of this. Others execute nothing of
            the probes: their counts and largest magnitudes are 0, and their gauges NaN.
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
    if isinstance(every, bool) or not isinstance(every, numbers.Integral) or every < 1:
        raise InvalidArgument(f"watch(every={every!r}): expected an integer from 1 on, such as 10.")
    return Watch(model, layers, every, _checked_kinds(kinds))


def _checked_kinds(kinds: Sequence[str]) -> Sequence[str]:
    if not _is_list_of_names(kinds) or not kinds or not set(kinds) <= {*KINDS, *GAUGES}:
        raise InvalidArgument(f"watch(kinds={kinds!r}): expected a list of {', '.join((*KINDS, *GAUGES))}.")
    return kinds


def _is_list_of_names(names: object) -> TypeGuard[Sequence[str] | Set[str]]:
    return (
        isinstance(names, (Sequence, Set))
        and not isinstance(names, (str, bytes))
        and all(isinstance(name, str) for name in names)
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _variables(layers: Sequence[keras.layers.Layer]) -> frozenset[int]:
    return frozenset(id(variable) for layer in layers for variable in layer.variables)


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
