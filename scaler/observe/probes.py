"""Tensors inside a model, their gradients and attention's logits, handed out of the forward and the backward pass."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaler.backend import bits, graphs
from scaler.backend.attention import Scores
from scaler.backend.layers import carry
from scaler.errors import InvalidArgument
from scaler.gradients.lists import Gradient
from scaler.observe.exponents import DTYPES, magnitude_bits


class Attention(NamedTuple):
    """What an attention layer did in a step, scalars in float32.

    Logits that grow without bound go before many divergences of transformers: Dehghani et al. 2023, "Scaling Vision
    Transformers to 22 Billion Parameters", arXiv:2302.05442; Wortsman et al. 2023, "Small-scale proxies for large-scale
    Transformer training instabilities", arXiv:2309.14322. So does an entropy that falls to 0: Zhai et al. 2023,
    "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", arXiv:2303.06296.

    Attributes:
        logit: The largest magnitude of a logit that is not masked, after the scale and before the softmax; infinity or
            NaN if one is.
        entropy: The mean over all heads and queries of -sum(p log p) over the keys, in nats: 0 for one key alone,
            log(n) for n keys alike. Queries without any key do not count; NaN without any query.
    """

    logit: tf.Tensor
    entropy: tf.Tensor


def attention_of(calls: Sequence[Callable[[], Scores]]) -> Attention:
    """What a layer did in all of its calls in a step, taken together.

    Args:
        calls: Functions that return the logits of one call each.
    """
    found = [_sums(one()) for one in calls]
    logit = bits.as_float(bits.largest([magnitude_bits(largest) for largest, _, _ in found]))
    return Attention(logit, tf.add_n([total for _, total, _ in found]) / tf.add_n([count for _, _, count in found]))


def _sums(scores: Scores) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The logits that count with 0 for the others, the sum of all queries' entropies, and the number of queries."""
    logits = tf.cast(scores.logits, tf.float32)
    counts = None if scores.mask is None else tf.broadcast_to(scores.mask, tf.shape(logits))
    if scores.axes > 1:
        shape = tf.concat([tf.shape(logits)[: -scores.axes], [-1]], axis=0)
        logits, counts = tf.reshape(logits, shape), counts if counts is None else tf.reshape(counts, shape)
    if counts is None:
        shifted = logits - tf.reduce_max(logits, axis=-1, keepdims=True)
        exponentials = tf.exp(shifted)
    else:
        logits = tf.where(counts, logits, 0.0)
        highest = tf.reduce_max(tf.where(counts, logits, logits.dtype.min), axis=-1, keepdims=True)
        shifted = tf.where(counts, logits - highest, 0.0)
        exponentials = tf.where(counts, tf.exp(shifted), 0.0)
    total = tf.reduce_sum(exponentials, axis=-1)
    # With Z = sum(exp(l)): -sum(p log p) = log Z - sum(p l).
    entropy = tf.math.log(total) - tf.reduce_sum(exponentials * shifted, axis=-1) / total
    if counts is None:
        return logits, tf.reduce_sum(entropy), tf.cast(tf.size(entropy), tf.float32)
    attends = tf.reduce_any(counts, axis=-1)
    return logits, tf.reduce_sum(tf.where(attends, entropy, 0.0)), tf.reduce_sum(tf.cast(attends, tf.float32))


ACTIVATIONS, GRADIENTS = "activations", "activation_gradients"


class Collection:
    """What the probes of one forward and one backward pass saw.

    It takes activations inside of `forward()`, gradients after it, and nothing once `rows` gave gradients: a gradient
    that a model takes inside of its forward pass, a forward pass repeated inside of the backward one and a second
    backward pass are not counted.

    Its tensors belong to the graph in which it was made. A probe in another one, such as the body of a loop, cannot
    give its tensor out, and its name is kept in `left_out`.

    Args:
        kinds: Of "activations" and "activation_gradients", those to take.
        takes: Whether to take what is probed under a name, by layer (True) or by hand (False).
        watch: The watch that it collects for.
        layers: The ids of the layers of its model: it alone takes what is probed by hand in them.

    Attributes:
        dtypes: For each name the dtypes of the tensors that were probed, such as ("float16",), in their order.
        called: The layers and probes that were called, those that are not taken as well.
    """

    def __init__(self, kinds: tuple[str, ...], takes: Callable[[str, bool], bool], watch: Any, layers: frozenset[int]):
        self._kinds = kinds
        self._takes = takes
        self.watch, self.layers = watch, layers
        self._graph = _graph()
        self._forward: bool | None = None
        self._seen: dict[str, dict[str, list[Gradient]]] = {ACTIVATIONS: {}, GRADIENTS: {}}
        self._order: dict[str, None] = {}
        self._elsewhere: dict[str, None] = {}
        self.dtypes: dict[str, tuple[str, ...]] = {}
        self.called: set[str] = set()
        self._scores: dict[str, list[Callable[[], Scores]]] = {}

    @contextlib.contextmanager
    def forward(self, beside: Sequence[Collection] = ()) -> Iterator[Collection]:
        """The forward pass: what `probe` is given inside of it comes here.

        Args:
            beside: Other collections of the same pass, which may be open.

        Raises:
            InvalidArgument: If another collection's forward pass is open.
        """
        if any(all(one is not other for other in beside) for one in _OPEN.get()):
            raise InvalidArgument(
                "watch.collect(): another collection is open, and of two at once only one would see the model. Have "
                "each forward pass in a `with` of its own, one after the other; the tape may be around both."
            )
        token = _OPEN.set((*_OPEN.get(), self))
        self._forward = True
        try:
            yield self
        finally:
            self._forward = False
            _OPEN.reset(token)

    def forget_gradients(self) -> None:
        """Before the backward pass of one of several losses of a forward pass: it takes the gradients of this one."""
        self._seen[GRADIENTS].clear()

    def see(self, x: tf.Tensor, name: str, *, by_layer: bool) -> tf.Tensor:
        """The same values, which are remembered, and their gradient once there is one."""
        self.called.add(name)
        if not self._takes(name, by_layer) or graphs.asks_for_shapes():
            return x
        self._order[name] = None
        if _graph() is not self._graph:
            self._elsewhere[name] = None
            return x
        if not self._forward:
            return x
        self.dtypes[name] = (*self.dtypes.get(name, ()), x.dtype.name)
        if ACTIVATIONS in self._kinds:
            self._seen[ACTIVATIONS].setdefault(name, []).append(x)
        return carry(x, self._identity(x, name)) if GRADIENTS in self._kinds else x

    def see_scores(self, scores: Callable[[], Scores], name: str) -> None:
        """Remembers how to compute the logits of one call of an attention layer."""
        if graphs.asks_for_shapes():
            return
        if _graph() is not self._graph:
            self._elsewhere[name] = None
        elif self._forward:
            self._scores.setdefault(name, []).append(scores)

    @property
    def scores(self) -> dict[str, list[Callable[[], Scores]]]:
        """For each attention layer that showed its logits, how to compute those of each call."""
        return {name: list(calls) for name, calls in self._scores.items() if name not in self._elsewhere}

    def rows(self) -> dict[str, list[Gradient]]:
        """The tensors of each row, "activations/name" and "activation_gradients/name": both in the forward order.

        Before the backward pass there are activations alone; asked again after it, there is all.
        """
        if self._seen[GRADIENTS]:
            self._forward = None
        names = [name for name in self._order if name not in self._elsewhere]
        return {
            f"{kind}/{name}": list(seen[name]) for kind, seen in self._seen.items() for name in names if name in seen
        }

    @property
    def left_out(self) -> list[str]:
        """The names that were probed in other graphs, if only once: an RNN calls its cell before the loop as well."""
        return list(self._elsewhere)

    @property
    def names(self) -> list[str]:
        """All names that were probed, those left out as well, in the order of the forward pass."""
        return list(self._order)

    def _identity(self, x: tf.Tensor, name: str) -> tf.Tensor:
        @tf.custom_gradient
        def through(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            def backward(gradient: Gradient) -> Gradient:
                if self._forward is False and _graph() is self._graph:
                    self._seen[GRADIENTS].setdefault(name, []).append(gradient)
                return gradient

            return x, backward

        return through(x)


def probe(x: tf.Tensor, name: str) -> tf.Tensor:
    """Lets a `watch` see a tensor inside of a model: its values, and those of its gradient.

        class Attention(keras.layers.Layer):
            def call(self, x):
                scores = observe.probe(tf.matmul(x, x, transpose_b=True), "scores")

    Nothing is added to a graph unless a `watch` collects. Called several times in a step with one name, the counts are
    added. Inside of a `tf.while_loop`, a `tf.cond` or a `tf.function` of the model's own it shows nothing, which the
    watch says.

    Args:
        x: Float16, bfloat16 or float32, of any shape.
        name: Of its rows, "activations/name" and "activation_gradients/name"; not that of a layer.

    Returns:
        `x` itself, or, where it is seen, the same values.

    Raises:
        InvalidArgument: For anything but such a tensor, and for a name that is empty or a layer's.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"probe(x, {name!r}): expected a name.")
    if isinstance(x, keras.KerasTensor):
        raise InvalidArgument(
            f"probe(x, {name!r}): x is symbolic, and a model made of it would not keep the probe. Call probe in the "
            "`call` of a layer, or name the layer in observe.watch."
        )
    if not is_probed(x):
        what = f"dtype {x.dtype}" if isinstance(x, tf.Tensor) else f"type {type(x).__name__}"
        raise InvalidArgument(f"probe(x, {name!r}): x has {what}: expected a float16, bfloat16 or float32 tensor.")
    for collection in _of_the_layer():
        x = collection.see(x, name, by_layer=False)
    return x


def is_probed(x: Any) -> bool:
    """Whether this is a tensor of a dtype that is counted."""
    return isinstance(x, tf.Tensor) and x.dtype in DTYPES


def current(watch: Any) -> Collection | None:
    """The collection of a watch whose forward pass this is, or None."""
    return next((one for one in _OPEN.get() if one.watch is watch), None)


@contextlib.contextmanager
def inside(layer: keras.layers.Layer) -> Iterator[None]:
    """Within it a layer is called: what is probed by hand belongs to its model."""
    token = _LAYER.set(layer)
    try:
        yield
    finally:
        _LAYER.reset(token)


def _of_the_layer() -> list[Collection]:
    """The open collections of the model whose layer is being called; outside of all models, all."""
    layer, found = _LAYER.get(), list(_OPEN.get())
    if len(found) < 2 or layer is None:
        return found
    own = [one for one in found if id(layer) in one.layers]
    return own or found


# A probe stands deep inside of a user's model, which cannot hand it a collection. Each thread, and so each replica, has
# its own value.
_OPEN: contextvars.ContextVar[tuple[Collection, ...]] = contextvars.ContextVar("scaler.observe.open", default=())
_LAYER: contextvars.ContextVar[Any] = contextvars.ContextVar("scaler.observe.layer", default=None)


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
