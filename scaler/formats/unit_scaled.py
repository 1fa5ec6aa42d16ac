"""Unit scaling: a model whose activations, weights and gradients begin with a variance of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from scaler.backend.autograph import no_autograph
from scaler.backend.layers import Call, calls_of
from scaler.errors import InvalidArgument
from scaler.formats.layers import UNIT, refuse_quantization
from scaler.formats.unit_layers import NAMES, Place, check_function, enter_branch, rule_of, scaled, terms


def unit_scaled(model: keras.Model) -> keras.Model:
    """Makes a model unit-scaled, and returns it: float16 then needs no loss scale to begin with.

    Each product is multiplied by constants, one on the way forward and others on the way back, that keep the variance
    of activations, of their gradients and of the gradients of weights near one at the first step. With n inputs, m
    outputs and b examples a `Dense` layer computes

        outputs = n^-1/2 x W        dx = m^-1/2 dy W^T        dW = b^-1/2 x^T dy

    The first two are the geometric mean of both unless the layer's input is an edge that cuts the graph in two, where
    gradients of all layers before it have the same constant. Activation functions have factors of the same kind.
    A branch and what goes around it are added as a running mean.

    Kernels and embeddings are drawn anew, from a standard normal law: with Adam their learning rate has to
    be about n^1/2 times as high for the same change of the outputs. Biases, gains and offsets keep their rate.
    Gradients have another size than those of the loss, so a norm to clip them to is another one, too, and SGD needs
    other rates.

    Call it once, before a step is made for the model, and train with `unit_cross_entropy`. Checkpoints and saved
    weights hold the weights alone: make the model again, call this, and load them behind it. A model that is
    saved as a whole, or cloned, has lost its factors.

    Args:
        model: Functional or Sequential, built, with layers that have a rule: Dense, EinsumDense, convolutions,
            Embedding, MultiHeadAttention, LayerNormalization, BatchNormalization, Add, and activation
            functions. For a narrow format as well, call `emulated(...)(model)` before.

    Raises:
        InvalidArgument: For another model, a layer without a rule, one that is called twice, or one that is
            unit-scaled already. The model is as it was then.

    References:
        Blake, Orr and Luschi 2023, Unit Scaling: Out-of-the-Box Low-Precision Training
        (https://arxiv.org/abs/2303.11257), and its code graphcore-research/unit-scaling-demo, scmm/uscale/ops.py.
        Factors of attention: graphcore-research/unit-scaling, unit_scaling/functional.py; the mean for a
        causal mask is ours. Factors of activation functions are computed from 4096 quantiles of a normal law.
    """
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"unit_scaled({model!r}): expected a Keras model, functional or Sequential.")
    if not getattr(model, "outputs", None):
        raise InvalidArgument(
            f"unit_scaled({model.name}): expected a functional or Sequential model that is built. A subclass of "
            "keras.Model does not say how its layers are connected. Begin a Sequential with keras.Input."
        )
    calls, outputs = calls_of(model)
    paths = {id(call.operation): call.operation.name for call in calls}
    for number, call in enumerate(calls):
        _check(call, paths, {id(each.operation) for each in calls[:number]})
    found = places(calls, outputs, lambda call: isinstance(call.operation, keras.layers.Add))
    for call, place in zip(calls, found, strict=True):
        layer = call.operation
        rule = rule_of(layer)
        assert rule is not None  # All of them were checked.
        rule(layer, paths[id(layer)], place)
        if place.into_branch != 1.0:
            enter_branch(layer, place.into_branch)
        object.__setattr__(layer, UNIT, True)
        refuse_quantization(layer, "unit-scaled")
    return model


def _check(call: Call, paths: dict[int, str], before: set[int]) -> None:
    """Refuses a call that has no factors of its own."""
    layer = call.operation
    path = paths[id(layer)]
    if id(layer) in before:
        raise InvalidArgument(
            f"{path}: this layer is called in several places of the model, which have factors of their own. Use a "
            "layer for each, or train this model as it is, with a loss scale."
        )
    if hasattr(layer, UNIT):
        raise InvalidArgument(f"{path}: this layer is unit-scaled already. Create the model again for new weights.")
    if rule_of(layer) is None:
        raise InvalidArgument(
            f"{path}: a layer of type {type(layer).__name__} has no rule of unit scaling. Those with one are {NAMES}; "
            "no subclass of them, no synchronized BatchNormalization, no LoRA. "
            "Train this model as it is, with a loss scale."
        )
    check_function(layer, path)


@no_autograph
def unit_cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean cross-entropy in nats whose gradients of logits begin with a variance of one, scalar float32.

    Its value is that of any cross-entropy. Its gradient is b k / sqrt(k - 1) times as large, for b rows of k logits: so
    large are those of a mean if all classes are as likely. On several replicas b is the number of rows of one.

    Args:
        labels: Integers [...], in [0, k).
        logits: Of any floating dtype, [..., k], with k of at least 2.

    Raises:
        InvalidArgument: For logits whose number of classes is not known, or is one; and from the gradient of a
            gradient.
    """
    logits = tf.cast(logits, tf.float32)
    classes = logits.shape[-1] if logits.shape.rank else None
    if classes is None or classes < 2:
        raise InvalidArgument(
            f"unit_cross_entropy(logits of shape {logits.shape}): expected a last axis of at least two classes, known "
            "when the step is traced."
        )
    rows = terms(logits, range(logits.shape.rank - 1))
    logits = scaled(logits, 1.0, rows * (classes / math.sqrt(classes - 1)))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)
    return tf.reduce_mean(losses)


def places(calls: Sequence[Call], outputs: Sequence[int], is_sum: Callable[[Call], bool]) -> list[Place]:
    """The place of each call.

    A factor of the pass back may differ from that of the pass forward where an edge cuts the graph in two: then all
    that lies before it has the same constant on its gradients. Elsewhere paths of different constants would be added.

    The sum of a branch and of what it leaves aside is a running mean, so that all branches weigh the same: the k-th has
    the variance 1 / (1 + k). Its factor on gradients stands at the entry of the branch, so that they have unit variance
    within it. Other sums weigh their inputs alike.

    Args:
        calls: Each behind those that it depends on.
        outputs: The places of those that make the outputs.
        is_sum: Whether a call is a sum.
    """
    cutting = _cutting(calls, outputs)
    found = [Place(len(call.sources) == 1 and (call.sources[0], at) in cutting) for at, call in enumerate(calls)]
    above: list[set[int]] = []
    for call in calls:
        above.append(set(call.sources).union(*(above[source] for source in call.sources)))
    for at, call in enumerate(calls):
        if not is_sum(call):
            continue
        count = len(call.sources)
        found[at] = found[at]._replace(parts=(count**-0.5,) * count, delayed=(False,) * count)
        branch = _branch(calls, outputs, above, at)
        if branch is None:
            continue
        beside, end, entries = branch
        share = 1 / (2 + sum(is_sum(calls[each]) for each in above[beside] | {beside}))
        parts = {beside: math.sqrt(1 - share), end: math.sqrt(share)}
        found[at] = found[at]._replace(
            parts=tuple(parts[each] for each in call.sources),
            delayed=tuple(each == end for each in call.sources),
        )
        for entry in entries:
            found[entry] = found[entry]._replace(into_branch=found[entry].into_branch * math.sqrt(share))
    return found


def _branch(calls: Sequence[Call], outputs: Sequence[int], above: list[set[int]], at: int) -> tuple | None:
    """A branch that a sum adds to the call where it begins: that call, the branch's last one, and its first ones."""
    sources = calls[at].sources
    if len(sources) != 2 or sources[0] == sources[1]:
        return None
    beside, end = sources if sources[0] in above[sources[1]] else sources[::-1]
    if beside not in above[end]:
        return None
    inside = {end} | {each for each in above[end] if beside in above[each]}
    entries = [each for each in sorted(inside) if beside in calls[each].sources]
    given = all(set(calls[each].sources) <= inside | {beside} for each in inside)
    kept = not inside & set(outputs) and not any(
        inside & set(call.sources) for place, call in enumerate(calls) if place != at and place not in inside
    )
    # A call that is also given something from within the branch would have that multiplied, too.
    alone = all(set(calls[each].sources) == {beside} for each in entries)
    return (beside, end, entries) if given and kept and alone else None


def _cutting(calls: Sequence[Call], outputs: Sequence[int]) -> set[tuple[int, int]]:
    """The edges (source, target) without which the graph falls into two. All outputs end in one place, the loss."""
    edges = [(source, at) for at, call in enumerate(calls) for source in call.sources]
    edges += [(output, len(calls)) for output in outputs]
    beside: list[list[tuple[int, int]]] = [[] for _ in range(len(calls) + 1)]
    for number, (source, target) in enumerate(edges):
        beside[source].append((number, target))
        beside[target].append((number, source))

    def is_joined_otherwise(without: int) -> bool:
        source, target = edges[without]
        reached, waiting = {target}, [target]
        for place in waiting:  # It grows while it is walked through.
            further = {other for number, other in beside[place] if number != without} - reached
            reached |= further
            waiting += further
        return source in reached

    return {edge for number, edge in enumerate(edges) if not is_joined_otherwise(number)}
