"""The probes of the parts of a `ComposedStep`: each part's are measured in its own pass, of its own loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.before import Before
from loops.step.noise_scale import NoiseScale
from loops.step.part_group import Decided, PartGroup
from loops.step.parts import Part
from loops.step.probing import NOISE_SCALE, Probing, Seen
from loops.step.turns import Taken

_ZEROS = ("counts", "amax")


class Look(NamedTuple):
    """What is known of a part's probes before it moves.

    Attributes:
        due: Whether this call is measured, scalar bool; None for always.
        at_its_turn: The same at a call that is known to be the part's turn.
        before: The part's weights as they are.
        loss_scale: What its gradients are scaled by, scalar float32.
    """

    due: tf.Tensor | None
    at_its_turn: tf.Tensor | None
    before: Before | None
    loss_scale: tf.Tensor


class PartProbes:
    """The measurements of the parts that have a watch, in the order of a step's calls.

    Args:
        probes: A watch for each part that is measured, by name.
        accumulate: Micro-batches per step.

    Attributes:
        probing: What measures each of them, by name.
    """

    def __init__(self, probes: Mapping[str, scaler.observe.Watch], accumulate: int):
        self.probing = {name: Probing(watch) for name, watch in probes.items()}
        self._accumulate = accumulate
        self._last: dict[str, dict[str, tf.TensorSpec]] = {}

    @property
    def watches(self) -> dict[str, scaler.observe.Watch]:
        """The watch of each part that has one, by name."""
        return {name: one.watch for name, one in self.probing.items() if one.watch is not None}

    def build(self, batch: Any) -> None:
        """Creates the state of the probes before anything is traced that needs it.

        Raises:
            scaler.InvalidArgument: If the step cannot measure what a watch asks for.
        """
        for name, probing in self.probing.items():
            if probing.watch is not None and NOISE_SCALE in probing.watch.kinds:
                _check_examples(name, batch)
            probing.build({0: self._accumulate})

    def look(self, group: PartGroup, turn: tf.Tensor | bool) -> dict[str, Look]:
        """Looks at the parts of a group before any of them moves.

        Args:
            group: The parts, with their masters.
            turn: Whether it is their turn; at other calls nothing is measured.
        """
        found = {}
        for part, weights, masters in zip(group.parts, group.weights, group.masters, strict=True):
            if (probing := self.probing.get(part.name)) is not None:
                at_its_turn = probing.due(group.loss_scaler)
                due = _both(at_its_turn, turn)
                before = probing.before(weights, masters, due)
                found[part.name] = Look(due, at_its_turn, before, group.loss_scaler.loss_scale)
        return found

    @contextlib.contextmanager
    def forward(self, parts: Sequence[Part]) -> Iterator[dict[str, scaler.observe.Collection]]:
        """Surrounds a forward pass that these parts share, and keeps the watched tensors of each."""
        found: dict[str, scaler.observe.Collection] = {}
        with contextlib.ExitStack() as opened:
            for part in parts:
                if (watch := self.watches.get(part.name)) is not None:
                    found[part.name] = opened.enter_context(watch.collect(beside=list(found.values())))
            yield found

    def measured(self, part: Part, collection: scaler.observe.Collection | None, due: tf.Tensor | None) -> Seen | None:
        """The measurements of a part's passes, after its backward pass and before that of the next part."""
        return self.probing[part.name].measured(collection, due) if part.name in self.probing else None

    def outputs(
        self,
        group: PartGroup,
        taken: Sequence[Taken | None],
        decided: Decided | None,
        looks: Mapping[str, Look],
        batch: Any,
    ) -> dict[str, tf.Tensor]:
        """The outputs of a group's probes after its decision, named as "generator/amax".

        Args:
            group: The parts.
            taken: The pass of each; None if it was not its turn.
            decided: What was decided; None where it is certain not to be their turn, as in eager mode. Nothing is known
                of the rows before the first turn then.
            looks: What `look` returned.
            batch: The step's.
        """
        if decided is None:
            return self._left_out(group)
        outputs: dict[str, tf.Tensor] = {}
        for place, (part, one) in enumerate(zip(group.parts, taken, strict=True)):
            if part.name in self.probing and one is not None:
                own = self._outputs(part, one, place, decided, looks[part.name], batch)
                self._last[part.name] = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in own.items()}
                outputs |= {f"{part.name}/{name}": value for name, value in own.items()}
        return outputs

    def _left_out(self, group: PartGroup) -> dict[str, tf.Tensor]:
        return {
            f"{part.name}/{name}": tf.fill(like.shape, tf.constant(0 if name in _ZEROS else float("nan"), like.dtype))
            for part in group.parts
            for name, like in self._last.get(part.name, {}).items()
        }

    def _outputs(
        self, part: Part, taken: Taken, place: int, decided: Decided, look: Look, batch: Any
    ) -> dict[str, tf.Tensor]:
        outcome = decided.outcomes[place]

        def noise(of: NoiseScale, grads: list) -> tf.Tensor:
            return of.measured(grads, look.loss_scale, batch, decided.attempted, outcome.grad_norm)

        measured = taken.seen, look.due, taken.grads, look.before, outcome.finite
        return self.probing[part.name].outputs(*measured, part.optimizer, noise)


def _both(due: tf.Tensor | None, turn: tf.Tensor | bool) -> tf.Tensor | None:
    if turn is True:
        return due
    now = tf.convert_to_tensor(turn)
    return now if due is None else tf.logical_and(due, now)


def _check_examples(name: str, batch: Any) -> None:
    """Refuses a batch whose first tensor does not say how many examples there are."""
    first = tf.nest.flatten(batch)[0]
    if getattr(first, "shape", tf.TensorShape(None)).rank == 0:
        raise scaler.InvalidArgument(
            f"ComposedStep(probes=...): the gradient noise scale of part {name!r} needs the number of examples, which "
            "is the first dimension of the first tensor of a batch, and here that is a scalar: expected a batch that "
            "begins with a tensor of examples."
        )


def check_part_probes(probes: Any, parts: Sequence[Part], retry: bool) -> None:
    """Refuses watches that do not belong to the parts.

    Args:
        probes: The argument of `ComposedStep`.
        parts: Its parts.
        retry: Its argument.

    Raises:
        scaler.InvalidArgument: With the name of the part.
    """
    if probes is None:
        return
    names = [part.name for part in parts]
    if not isinstance(probes, Mapping) or not probes or not set(probes) <= set(names):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes={probes!r:.100}): expected a dict of hs.observe.watch(model) by the names of "
            f"parts, of which there are {', '.join(names)}."
        )
    if retry:
        raise scaler.InvalidArgument(
            "ComposedStep(retry=True, probes=...): probes measure the first backward pass and not the one that is "
            "applied. Use one of the two."
        )
    owners: dict[int, str] = {}
    for part in parts:
        if part.name in probes:
            _check_watch(part, probes[part.name])
            other = owners.setdefault(id(probes[part.name]), part.name)
            if other != part.name:
                raise scaler.InvalidArgument(
                    f"ComposedStep(probes=...): the parts {other!r} and {part.name!r} have one watch, whose rows are "
                    "those of one part: expected an hs.observe.watch(...) for each."
                )


def _check_watch(part: Part, watch: Any) -> None:
    if not isinstance(watch, scaler.observe.Watch):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes=...): part {part.name!r} has {watch!r:.100}: expected hs.observe.watch(model)."
        )
    held = {id(variable) for variable in watch.model.variables}
    if not any(id(variable) in held for variable in part.variables):
        raise scaler.InvalidArgument(
            f"ComposedStep(probes=...): part {part.name!r} has a watch of model {watch.model.name!r}, which has none "
            "of the variables that this part moves: expected a watch of a Keras model that has some."
        )
