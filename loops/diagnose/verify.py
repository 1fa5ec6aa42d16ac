"""Checks whether probes change a run: compares the same steps with and without probes, bit for bit.

A probe that reads a tensor may prevent TensorFlow from regrouping or fusing operations around it. That changes the
rounding, and may cause or hide an overflow. Only a trial shows which probes do.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import without_advice
from loops.loop.loop import Loop
from loops.loop.visit import Visit
from loops.run.train import weights_digest
from loops.step.train_step import TrainStep
from loops.support.errors import check_count
from loops.support.user_function import in_empty_folders

MODES = {"graph": False, "jit_compile": True}
"""The modes in which the forward and backward pass run, and whether XLA compiles them."""
_IN_THE_PASS = scaler.observe.KINDS[:2]
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the run by a probe.

    Attributes:
        mode: "graph" or "jit_compile".
        probes: The layer or hand-set probe, or the kind, such as "weight_gradients"; several if only all of them
            together change the run.
        step: The first step whose outputs differ, from 1; None if only the weights differ.
        outputs: The outputs of that step that differ, by name: without and with the probe.
    """

    mode: str
    probes: tuple[str, ...]
    step: int | None
    outputs: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        where = "in a graph" if self.mode == "graph" else "compiled by XLA"
        names = " and ".join(map(repr, self.probes))
        if self.step is None:
            return f"{where}, probing {names} changes the weights, but no output of a step"
        differ = ", ".join(
            f"{name} is {one} without and {other} with it" for name, (one, other) in self.outputs.items()
        )
        return f"{where}, probing {names} changes step {self.step}: {differ}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        steps: The number of steps of each run.
        probes: The probes: layers, hand-set probes, and kinds of tensors outside the model.
        left_out: The layers that cannot be probed, see `scaler.observe.Watch.left_out`.
        digests: For each mode that ran, the digests of the weights without and with all probes.
        not_compiled: The reason why XLA could not compile the model, or None.
        changes: The probes that changed the run, one entry for each smallest set found.
    """

    steps: int
    probes: tuple[str, ...]
    left_out: tuple[str, ...]
    digests: dict[str, tuple[str, str]]
    not_compiled: str | None
    changes: tuple[Change, ...]

    @property
    def neutral(self) -> bool:
        """Whether weights and outputs are the same, bit for bit, in every mode that ran."""
        return not self.changes

    def __str__(self) -> str:
        modes = " and ".join("in a graph" if mode == "graph" else "compiled by XLA" for mode in self.digests)
        lines = [f"{self.steps} steps {modes}, {len(self.probes)} probe{'s' * (len(self.probes) != 1)}"]
        lines += [f"not compiled by XLA: {self.not_compiled}"] if self.not_compiled else []
        lines += list(map(str, self.changes)) or ["no probe changes a bit of the weights or of an output"]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Run:
    digest: str
    outputs: list[dict[str, np.generic]]
    watch: scaler.observe.Watch | None

    def same(self, other: _Run) -> bool:
        """Whether weights and outputs are the same, bit for bit."""
        return self.digest == other.digest and _bits(self) == _bits(other)


def _bits(run: _Run) -> list[dict[str, bytes]]:
    return [{name: value.tobytes() for name, value in outputs.items()} for outputs in run.outputs]


def verify(
    build: Callable[[], Loop],
    steps: int = 10,
    probes: Callable[[keras.Model], scaler.observe.Watch] | None = None,
) -> Verification:
    """Runs the same steps with and without probes, in a graph and compiled by XLA, and reports which probes change it.

        found = loops.observe.verify(build)
        print(found)

    It compares a digest of the weights and the outputs of each step. The answer holds for this model, data, machine and
    these versions. If something differs, the probes are halved until the smallest sets that change it are found. The
    actions of the loops do not run.

    Args:
        build: A function that returns a new run at each call: a `Loop` with a `TrainStep`, a model, data, and all its
            seeds. Keras's and TensorFlow's global seeds are set to 0 before each call. If the function takes a folder,
            as for `halfstep explain --build`, it gets an empty one each time.
        steps: The number of steps of each run.
        probes: A function of the model, such as `scaler.observe.watch`. By default the probes of the `TrainStep`, or
            `scaler.observe.watch(model)` if it has none.

    Raises:
        scaler.InvalidArgument: For arguments that cannot work, and if two runs without probes differ.
        OutOfData: If the dataset ends before these steps.
    """
    check_count(f"verify(steps={steps!r})", steps)
    if not callable(build) or not (probes is None or callable(probes)):
        raise scaler.InvalidArgument(
            f"verify(build={build!r}, probes={probes!r}): expected a function without arguments, or of a folder, that "
            "returns an hs.Loop, and a function of the model that returns an observe.Watch, or None."
        )
    with in_empty_folders(build) as build_in_folder:
        return _verified(build_in_folder, int(steps), probes)


def _verified(build: Callable[[], Loop], steps: int, probes: Callable | None) -> Verification:
    digests: dict[str, tuple[str, str]] = {}
    changes: list[Change] = []
    not_compiled, items, left_out = None, [], []
    for mode, compiles in MODES.items():
        trial = _Trial(build, steps, probes, compiles)
        try:
            without = trial.run()
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not compiles:
                raise
            not_compiled = str(error.message).splitlines()[0]
            continue
        if not trial.run().same(without):
            raise scaler.InvalidArgument(
                f"verify(build): two runs of {steps} steps without probes gave different weights or losses, so the "
                "effect of probes cannot be determined. Set the seeds of the data and of the model's layers in build."
            )
        whole = trial.run(probed=True)
        items, left_out = _items(whole.watch), whole.watch.left_out if whole.watch else []
        digests[mode] = without.digest, whole.digest
        if not whole.same(without):
            changes += [_change(mode, found, without, run) for found, run in _bisect(trial, items, whole, without)]
    return Verification(steps, tuple(items), tuple(left_out), digests, not_compiled, tuple(changes))


class _Trial:
    """Runs of one mode."""

    def __init__(self, build: Callable[[], Loop], steps: int, probes: Callable | None, compiles: bool):
        self._build, self._steps, self._probes, self._compiles = build, steps, probes, compiles

    def run(self, items: Sequence[str] = (), *, probed: bool = False) -> _Run:
        """Runs from the beginning, with these probes, with all if `probed`, or without any."""
        keras.utils.set_random_seed(_SEED)
        loop = self._build()
        if not isinstance(loop, Loop) or not isinstance(loop.train_step, TrainStep):
            what = f"a Loop of {loop.train_step!r}" if isinstance(loop, Loop) else repr(loop)
            raise scaler.InvalidArgument(f"verify(build): it returned {what}: expected an hs.Loop of a TrainStep.")
        step = loop.train_step
        seen: list[dict[str, np.generic]] = []
        watch = self._watch(step, items) if items or probed else None
        step.probes, step.jit_compile = watch, self._compiles
        loop.calls.go_on_as(False)  # The mode says what XLA compiles, and not what a Loop would choose.

        def record(visit: Visit) -> None:
            count = len(next(iter(visit.outputs.values())))
            seen.extend({name: value[number] for name, value in visit.outputs.items()} for number in range(count))

        loop.actions = [record]
        # If the run is stuck, the steps until then are compared.
        with contextlib.suppress(scaler.StuckError), without_advice():
            loop.run(self._steps)
        return _Run(weights_digest(step.model), seen, watch)

    def _watch(self, step: TrainStep, items: Sequence[str]) -> scaler.observe.Watch:
        """These probes of the step, or all of them."""
        watch = self._probes(step.model) if self._probes else step.probes or scaler.observe.watch(step.model)
        if not isinstance(watch, scaler.observe.Watch):
            raise scaler.InvalidArgument(
                f"verify(probes=...): the function returned {watch!r}: expected hs.observe.watch(model)."
            )
        if not items:
            return watch
        outside = [kind for kind in watch.kinds if kind in items]
        names = [item for item in items if item not in outside]
        inside = [kind for kind in watch.kinds if kind in _IN_THE_PASS] if names else []
        return watch.part(names, [*inside, *outside])


def _items(watch: scaler.observe.Watch | None) -> list[str]:
    """The probes that can be left out one by one: layers, hand-set probes, and kinds of tensors outside the model."""
    rows = [name.partition("/") for name in watch.names] if watch else []
    return list(dict.fromkeys(name if kind in _IN_THE_PASS else kind for kind, _, name in rows))


def _bisect(trial: _Trial, items: list[str], run: _Run, without: _Run) -> list[tuple[list[str], _Run]]:
    """The smallest sets of these that change the run, as far as halving finds them."""
    if len(items) < 2:
        return [(items, run)]
    found = []
    for half in (items[: len(items) // 2], items[len(items) // 2 :]):
        part = trial.run(half)
        if not part.same(without):
            found += _bisect(trial, half, part, without)
    return found or [(items, run)]


def _change(mode: str, items: list[str], without: _Run, run: _Run) -> Change:
    for number, (one, other) in enumerate(zip(without.outputs, run.outputs, strict=False)):
        names = [name for name in one if one[name].tobytes() != other[name].tobytes()]
        differ = {name: (one[name].item(), other[name].item()) for name in names}
        if differ:
            return Change(mode, tuple(items), number + 1, differ)
    return Change(mode, tuple(items), None, {})
