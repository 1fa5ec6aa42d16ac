"""Whether observing a run changes it: the same steps with and without probes, compared bit for bit.

A probe that reads a tensor may keep TensorFlow from regrouping or fusing operations around it, and so round otherwise,
or cause or hide an overflow. Which probes do is found by trying.
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
from loops.diagnose.advice import without_advice
from loops.loop.loop import Loop
from loops.loop.visit import Visit
from loops.run.digest import weights_digest
from loops.step.train_step import TrainStep
from loops.support.checks import check_count
from loops.support.user_function import in_empty_folders

MODES = {"graph": False, "jit_compile": True}
"""How the forward and backward pass are run, and whether XLA compiles them then."""
_IN_THE_PASS = scaler.observe.KINDS[:2]
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Change:
    """What a probe changed.

    Attributes:
        mode: "graph" or "jit_compile".
        probes: The layer or hand-set probe, or the kind, such as "weight_gradients"; several where none of them alone
            changes the run, and all together do.
        step: The first step with another output, from 1; None where only the weights differ.
        outputs: Those of that step that differ, by name: without and with the probe.
    """

    mode: str
    probes: tuple[str, ...]
    step: int | None
    outputs: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        where = "in a graph" if self.mode == "graph" else "compiled by XLA"
        names = " and ".join(map(repr, self.probes))
        if self.step is None:
            return f"{where}, probing {names} changes the weights, and no output of a step"
        differ = ", ".join(
            f"{name} is {one} without and {other} with it" for name, (one, other) in self.outputs.items()
        )
        return f"{where}, probing {names} changes step {self.step}: {differ}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        steps: How many were run.
        probes: What was probed: layers, hand-set probes, and kinds of tensors outside of the model.
        left_out: What cannot be probed, see `scaler.observe.Watch.left_out`.
        digests: For each mode that could be run the digests of the weights, without and with all probes.
        not_compiled: Why XLA could not compile the model, or None.
        changes: What changed the run, one entry for each.
    """

    steps: int
    probes: tuple[str, ...]
    left_out: tuple[str, ...]
    digests: dict[str, tuple[str, str]]
    not_compiled: str | None
    changes: tuple[Change, ...]

    @property
    def neutral(self) -> bool:
        """Whether weights and outputs are the same, bit for bit, in every mode that could be run."""
        return not self.changes

    def __str__(self) -> str:
        modes = " and ".join("in a graph" if mode == "graph" else "compiled by XLA" for mode in self.digests)
        said = [f"{self.steps} steps {modes}, {len(self.probes)} probe{'s' * (len(self.probes) != 1)}"]
        said += [f"not compiled by XLA: {self.not_compiled}"] if self.not_compiled else []
        said += list(map(str, self.changes)) or ["no probe changes a bit of the weights or of an output"]
        return "\n".join(said)


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
    """Runs the same steps with and without probes, in a graph and compiled by XLA, and says which probe changed what.

        found = loops.observe.verify(build)
        print(found)

    Compared are a digest of the weights and the outputs of each step. It holds for the model, the data, the machine and
    the versions it was run with. Where something differs, the probes are halved until those are found that change it.
    The actions of the loops do not act.

    Args:
        build: Makes the run anew at each call: a `Loop` with a `TrainStep`, with its model, its data and all its seeds.
            Keras's and TensorFlow's global seeds are set to 0 before each call. A function that asks for a folder, as
            those of `halfstep explain --build` do, gets an empty one each time.
        steps: How many to run, each time.
        probes: A function of the model, such as `scaler.observe.watch`. If not given, the probes of the `TrainStep`, or
            `scaler.observe.watch(model)` where it has none.

    Raises:
        scaler.InvalidArgument: For arguments that cannot work, and if two runs without probes end with other weights.
        OutOfData: If the dataset ends before.
    """
    check_count(f"verify(steps={steps!r})", steps)
    if not callable(build) or not (probes is None or callable(probes)):
        raise scaler.InvalidArgument(
            f"verify(build={build!r}, probes={probes!r}): expected a function without arguments, or of a folder, that "
            "returns a loops.Loop, and a function of the model that returns an observe.Watch, or None."
        )
    with in_empty_folders(build) as made:
        return _verified(made, int(steps), probes)


def _verified(build: Callable[[], Loop], steps: int, probes: Callable | None) -> Verification:
    digests: dict[str, tuple[str, str]] = {}
    changes: list[Change] = []
    not_compiled, items, left_out = None, [], []
    for mode, compiles in MODES.items():
        trial = _Trial(build, steps, probes, compiles)
        try:
            without = trial.run(None)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not compiles:
                raise
            not_compiled = str(error.message).splitlines()[0]
            continue
        if not trial.run(None).same(without):
            raise scaler.InvalidArgument(
                f"verify(build): two runs of {steps} steps without probes had other weights or losses, so that nothing "
                "can be said of probes. Have build set the seeds of the data and of the model's layers."
            )
        whole = trial.run(trial.all)
        items, left_out = _items(whole.watch), whole.watch.left_out if whole.watch else []
        digests[mode] = without.digest, whole.digest
        if not whole.same(without):
            changes += [_change(mode, found, without, run) for found, run in _bisect(trial, items, whole, without)]
    return Verification(steps, tuple(items), tuple(left_out), digests, not_compiled, tuple(changes))


class _Trial:
    """Runs of one mode."""

    def __init__(self, build: Callable[[], Loop], steps: int, probes: Callable | None, compiles: bool):
        self._build, self._steps, self._probes, self._compiles = build, steps, probes, compiles

    def run(self, choose: Callable[[TrainStep], scaler.observe.Watch] | None) -> _Run:
        """One run from its beginning, with what `choose` chooses of its probes."""
        keras.utils.set_random_seed(_SEED)
        loop = self._build()
        if not isinstance(loop, Loop) or not isinstance(loop.train_step, TrainStep):
            what = f"a Loop of {loop.train_step!r}" if isinstance(loop, Loop) else repr(loop)
            raise scaler.InvalidArgument(f"verify(build): it returned {what}: expected a loops.Loop of a TrainStep.")
        step = loop.train_step
        seen: list[dict[str, np.generic]] = []
        watch = choose(step) if choose else None
        step.probes, step.jit_compile = watch, self._compiles

        def record(visit: Visit) -> None:
            count = len(next(iter(visit.outputs.values())))
            seen.extend({name: value[number] for name, value in visit.outputs.items()} for number in range(count))

        loop.actions = [record]
        # The steps until then are compared like any others.
        with contextlib.suppress(scaler.StuckError), without_advice():
            loop.run(self._steps)
        return _Run(weights_digest(step.model), seen, watch)

    def all(self, step: TrainStep) -> scaler.observe.Watch:
        """All of the probes."""
        if self._probes:
            watch = self._probes(step.model)
            if not isinstance(watch, scaler.observe.Watch):
                raise scaler.InvalidArgument(
                    f"verify(probes=...): the function returned {watch!r}: expected scaler.observe.watch(model)."
                )
            return watch
        return step.probes or scaler.observe.watch(step.model)

    def of(self, items: Sequence[str]) -> Callable[[TrainStep], scaler.observe.Watch]:
        """These alone."""

        def choose(step: TrainStep) -> scaler.observe.Watch:
            watch = self.all(step)
            outside = [kind for kind in watch.kinds if kind in items]
            names = [item for item in items if item not in outside]
            inside = [kind for kind in watch.kinds if kind in _IN_THE_PASS] if names else []
            return watch.part(names, [*inside, *outside])

        return choose


def _items(watch: scaler.observe.Watch | None) -> list[str]:
    """What can be left out by itself: a layer or a hand-set probe, and a kind of tensors outside of the model."""
    rows = [name.partition("/") for name in watch.names] if watch else []
    return list(dict.fromkeys(name if kind in _IN_THE_PASS else kind for kind, _, name in rows))


def _bisect(trial: _Trial, items: list[str], run: _Run, without: _Run) -> list[tuple[list[str], _Run]]:
    """The least sets of these that change the run, of those that halving finds."""
    if len(items) < 2:
        return [(items, run)]
    found = []
    for half in (items[: len(items) // 2], items[len(items) // 2 :]):
        part = trial.run(trial.of(half))
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
