"""Changes of a run that are meant: what `Checkpoint(changed=...)` names differs from there on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

import scaler
from loops.step.user_steps import named_by
from loops.support.errors import CheckpointError

_FIXED = {
    "workers": "each worker has checkpoints of its own",
}
"""What cannot be changed, and why."""
_CALLED = {"loss_scaler": "strategy"}
"""What a user calls by another name than the facts of a checkpoint."""


class Resumed(NamedTuple):
    """Where a run went on.

    Attributes:
        step: The step of the checkpoint.
        changes: What differs from there on, as sentences.
    """

    step: int
    changes: tuple[str, ...]


class Unlike(NamedTuple):
    """What of a checkpoint is not restored as it was saved.

    Attributes:
        apart: The groups of variables that begin anew.
        replicas: Whether the variables have other numbers of components.
        restart: The batches of the dataset that are passed over from its beginning; None if its position is restored.
    """

    apart: frozenset[str] = frozenset()
    replicas: bool = False
    restart: int | None = None

    def explains(self, setting: str) -> bool:
        """Whether a setting is another one because of that."""
        batches = self.restart is not None and setting.endswith(".batch_size")
        return batches or (self.replicas and setting == "Loop.jit_compile")


AS_SAVED = Unlike()
"""Everything is restored as it was saved."""


class Changes:
    """The settings that may differ from those of a checkpoint.

    Args:
        names: Those of arguments, such as `learning_rate` or `loss_scaler`, or of a checkpoint's facts.

    Raises:
        scaler.InvalidArgument: If they are no names, or those of what cannot be changed.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise scaler.InvalidArgument(
                f"Checkpoint(changed={names!r}): expected a list of names, such as ['learning_rate', 'clip_norm']."
            )
        fixed = next((name for name in names if name in _FIXED), None)
        if fixed is not None:
            raise scaler.InvalidArgument(
                f"Checkpoint(changed={list(names)!r}): a run does not go on with another {fixed}, since "
                f"{_FIXED[fixed]}: expected names of other settings, such as 'learning_rate'."
            )
        self.names = tuple(names)

    def are(self, fact: str) -> bool:
        """Whether a fact of a checkpoint may differ.

        Args:
            fact: Its name, with those that it is part of: `optimizer.learning_rate`.
        """
        return any(_is_part(fact, name) for name in self.names)

    def check(self, known: Iterable[str]) -> None:
        """Checks that each name is that of a fact.

        Raises:
            scaler.InvalidArgument: If one is not.
        """
        facts = list(known)
        for name in self.names:
            if not any(_is_part(fact, name) for fact in facts):
                there = sorted({fact.split(".")[-1] for fact in facts} - {*_FIXED, *_CALLED.values()} | {*_CALLED})
                raise scaler.InvalidArgument(
                    f"Checkpoint(changed={list(self.names)!r}): this run has no setting {name!r}: expected some of "
                    f"{', '.join(there)}."
                )


NO_CHANGES = Changes(())
"""Of a run that goes on as it was."""


def way_out(facts: Sequence[str], meant: Changes, saved: Mapping, here: Mapping) -> str:
    """How to go on with differences that are meant, as a sentence; why not, if some cannot be changed.

    Args:
        facts: The names of those that differ.
        meant: Those that are named already.
        saved: The facts then, without nested dicts.
        here: The facts now.
    """
    fixed = next(filter(None, (why_fixed(fact, saved, here) for fact in facts)), None)
    if fixed:
        return f" No changed= helps: {fixed}"
    words = {value: key for key, value in _CALLED.items()}
    names = list(dict.fromkeys(_word(fact, words) for fact in facts if not meant.are(fact)))
    if any(name in _FIXED for name in names):
        return ""
    asked = " ".join(f"--changed {name}" for name in names)
    return f" If that is meant, say so: Checkpoint(..., resume=True, changed={names!r}), on the command line {asked}."


def _word(fact: str, words: Mapping[str, str]) -> str:
    """What a user calls a fact: the part of its name that is an argument."""
    parts = fact.split(".")
    argument = parts[1] if len(parts) > 1 and parts[0] in ("optimizer", "run") else parts[0]
    argument = parts[2] if len(parts) > 2 and parts[0] == "parts" else argument
    return words.get(argument, argument)


def _is_part(fact: str, name: str) -> bool:
    wanted = _CALLED.get(name, name)
    return wanted in fact.split(".") or f"{fact}.".startswith(f"{wanted}.")


def rates_of(train_step: object) -> dict[int, tuple[Any, float]]:
    """The constant learning rates of a step's optimizers, with each optimizer."""
    optimizers = named_by(train_step, keras.optimizers.Optimizer)
    return {id(one): (one, float(one.learning_rate)) for one in optimizers if not _has_schedule(one)}


def set_rates(rates: Mapping[int, tuple[Any, float]]) -> None:
    """Gives optimizers the learning rates that `rates_of` returned."""
    for optimizer, rate in rates.values():
        optimizer.learning_rate = rate


def _has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    config = optimizer.get_config().get("learning_rate")
    return not isinstance(config, int | float)


def is_another_strategy(saved: object, here: object) -> bool:
    """Whether two strategies, as text, are of other classes, so that the state of one means nothing to the other."""
    then, now = (re.findall(r"\w+(?=\()", str(text)) for text in (saved, here))
    return then != now


def refuse_other_state(path: str, changed: Iterable[str], saved: Mapping, here: Mapping) -> None:
    """Refuses a change after which saved variables would mean something else, though they have the same shapes.

    Args:
        path: Of the checkpoint.
        changed: The names of the facts that differ and are meant to, without the strategy that begins anew.
        saved: The facts then, without nested dicts.
        here: The facts now.

    Raises:
        CheckpointError: For another class of optimizer, or of a strategy but the step's own; a ComposedStep's windows.
    """
    for fact in changed:
        if why := why_fixed(fact, saved, here):
            raise CheckpointError(f"{path}: {why}")


def why_fixed(fact: str, saved: Mapping, here: Mapping) -> str | None:
    """Why a run cannot go on with another value of a fact, and what to do instead; None if it can.

    Args:
        fact: Its name.
        saved: The facts then, without nested dicts.
        here: The facts now.
    """
    then, now = saved.get(fact), here.get(fact)
    if fact == "accumulate" and any(name.startswith("parts.") for name in here):
        return (
            f"it was saved with ComposedStep(accumulate={then}), and this run has accumulate={now}: its parts take "
            "turns by windows of that size. Use that of the run; only a TrainStep can change it."
        )
    is_strategy = fact.endswith(".strategy") or fact.startswith("PerLoss")
    if fact.endswith("optimizer.class") or (is_strategy and is_another_strategy(then, now)):
        return f"the state of {then!r} means nothing to {now!r} ({fact}). {_WEIGHTS_ALONE}"
    if fact.endswith("learning_rate") and isinstance(then, int | float) != isinstance(now, int | float):
        return f"a constant rate is a variable of the optimizer, and a schedule is none ({fact}). {_WEIGHTS_ALONE}"
    return None


_WEIGHTS_ALONE = (
    "To go on with the weights alone, resume once as that run was, call model.save_weights, and load them in a new run "
    "with another folder."
)
