"""Guards that what is decided of remedies, trials and findings hangs on their kinds: every sentence may be reworded."""

import contextlib
import dataclasses
import itertools
import string
import types

import numpy as np
import pytest

from loops.diagnose.doctor import timing
from loops.diagnose.doctor.shown import advice
from loops.diagnose.doctor.timing import Kind as Change
from loops.diagnose.doctor.timing import Trial
from loops.diagnose.explain.case import Case
from loops.diagnose.explain.explanation import Explanation, describe
from loops.diagnose.explain.remedies import AT_THE_STEP, OF_THE_UPDATE, SINCE_THE_CHECKPOINT, Kind, Remedy, Row
from loops.diagnose.explain.trials import blame_of, grown_through, helped, in_order, weighed
from loops.diagnose.lint.subject import Finding, Severity, note
from loops.diagnose.lint.subject import Kind as Rule

NAMES = {
    Kind.LAYER_IN_FLOAT32: "'a' in float32",
    Kind.FOLLOWING_IN_FLOAT32: "'a' and all after it in float32",
    Kind.ALL_IN_FLOAT32: "every layer in float32",
    Kind.LOSS_IN_FLOAT32: "the loss in float32",
    Kind.DERIVATIVES_ZEROED: "derivatives of 'a' that are not finite set to zero",
    Kind.OWN_VARIABLES_CLEARED: "the step's own variables set to zero",
    Kind.ANOTHER_BATCH: "another batch",
    Kind.LEARNING_RATE: "0.1 of the learning rate for the last 4 steps",
    Kind.WEIGHT_DECAY: "no weight decay for the last 4 steps",
}
MISLEADING = iter(range(10**6))


def remedy(kind, since=False, **changes):
    layer = "a" if kind in (Kind.LAYER_IN_FLOAT32, Kind.FOLLOWING_IN_FLOAT32) else None
    name = NAMES.get(kind, kind.value)
    made = Remedy(kind, name, True, True, 1.0, f"{name}.", helps=True, layer=layer, since_checkpoint=since)
    return dataclasses.replace(made, **changes)


def misleading(text=None):
    """Words that once decided, in another order each time."""
    words = [*NAMES.values(), "note: ", "to compare with", "taken again it is finite", "prefetch"]
    words.append("gradient checkpointing")
    number = next(MISLEADING)
    return f"{words[number % len(words)]} {number} in float32"


def reworded(one):
    texts = ("name", "advice", "finding", "measured", "instead", "sentence", "differs", "problem")
    known = {field.name for field in dataclasses.fields(one)}
    return dataclasses.replace(one, **{name: misleading() for name in texts if name in known and getattr(one, name)})


@pytest.mark.parametrize("kind", Kind)
def test_what_is_blamed(kind):
    for since, where, fits_at in itertools.product((False, True), (None, "data", "weights", "forward"), (None, 64.0)):
        found = [remedy(kind, since), remedy(Kind.CLIP_NORM, helps=False)]
        again = [reworded(one) for one in found]
        assert blame_of(again, where, fits_at) == blame_of(found, where, fits_at)
        assert grown_through(again) == grown_through(found)
        for asked in (Kind.ANOTHER_BATCH, Kind.LAYER_IN_FLOAT32):
            for layer in (None, "a", "b"):
                assert helped(again, asked, layer) == helped(found, asked, layer)


def test_what_is_blamed_is_what_it_was():
    """Not only the same for any words."""
    assert blame_of([remedy(Kind.ANOTHER_BATCH)], "forward", None) == "batch"
    assert blame_of([remedy(Kind.ANOTHER_BATCH), remedy(Kind.LAYER_IN_FLOAT32)], "forward", None) is None
    assert blame_of([remedy(Kind.ANOTHER_BATCH), remedy(Kind.LOSS_IN_FLOAT32)], "forward", None) == "batch"
    assert blame_of([remedy(Kind.LEARNING_RATE, True)], "forward", None) == "weights"
    assert blame_of([remedy(Kind.LEARNING_RATE)], "forward", None) is None
    assert grown_through([remedy(Kind.LEARNING_RATE, True)]) == "learning rate"
    assert grown_through([remedy(Kind.LEARNING_RATE, True), remedy(Kind.WEIGHT_DECAY, True)]) == "weight decay"
    assert grown_through([remedy(Kind.LEARNING_RATE), remedy(Kind.EPSILON, True)]) is None


class Attempts:
    """Of a step that passes whatever is changed."""

    scanned_at, loss_scale, scalers, to_blame, part = None, 1024.0, (), None, None

    def __init__(self):
        self.moment = types.SimpleNamespace(rows=[], step=5, logged=None, next_batch=0)

    def in_time(self):
        return True

    def take(self, change, batch=None):
        return types.SimpleNamespace(finite=True, loss=2.0, at_scale=None, moved=None, nonzero=np.ones([2], np.float32))

    take_at = take


def test_the_order_of_what_helps():
    known = Explanation(step=5, reproduced=True, differs=None, verdict="overflow", fits_at=64.0, loss_scale=1024.0)
    names = {kind: NAMES.get(kind, kind.value) for kind in Kind if kind is not Kind.LOSS_SCALE}
    rows = [Row(kind, name, "", lambda it: contextlib.nullcontext()) for kind, name in names.items()]
    found = [one.kind for one in in_order(known, Case(Attempts()), rows)]
    again = in_order(known, Case(Attempts()), [one._replace(name=misleading()) for one in rows])
    assert [one.kind for one in again] == found
    assert found[:2] == [Kind.OWN_VARIABLES_CLEARED, Kind.WEIGHT_DECAY]
    assert found[-1] is Kind.DERIVATIVES_ZEROED


def test_each_word_of_a_remedy_is_known():
    """No type checker reads a template."""
    known = {f"it.{name}" for name in (*vars(Case), *(one.name for one in dataclasses.fields(Case)))}
    of_each = {"number", "fit", "value", "owner.name", "owner.compute_dtype", "factor", "of", "to"}
    for row in (*AT_THE_STEP, *OF_THE_UPDATE, *SINCE_THE_CHECKPOINT):
        words = {word for text in (row.name, row.advice) for _, word, _, _ in string.Formatter().parse(text) if word}
        assert words <= known | of_each


@pytest.mark.parametrize("kind", [Kind.ALL_IN_FLOAT32, Kind.ANOTHER_BATCH, Kind.EPSILON])
def test_what_a_remedy_is_worth(kind):
    def weigh(remedies):
        counts = {one.name: np.array([2 + place, 0]) for place, one in enumerate(remedies)}
        failing = np.array([9, 10])
        return [
            dataclasses.replace(one, name="", advice="") for one in weighed(remedies, counts, lambda: failing, [1.0])
        ]

    found = [remedy(kind), remedy(Kind.CLIP_NORM)]
    assert weigh([reworded(one) for one in found]) == weigh(found)


@pytest.mark.parametrize("comparable", [False, True])
@pytest.mark.parametrize("finite_again", [False, True])
def test_what_is_said_of_a_replay_that_differs(comparable, finite_again):
    def said(differs):
        found = Explanation(
            step=5,
            reproduced=False,
            differs=differs,
            verdict="healthy",
            comparable=comparable,
            finite_again=finite_again,
        )
        return describe(found).replace(differs, "")

    assert said(misleading()) == said("It differs.")
    assert ("It is unknown whether" in said("x" * 99)) is not comparable
    assert ("this does not show why" in said("x" * 99)) is finite_again


def diagnosis(trials):
    spread = types.SimpleNamespace(median=10.0)
    turns = types.SimpleNamespace(verdict="slower", ratio=spread)
    own = types.SimpleNamespace(all=types.SimpleNamespace(total=100), total_recomputed=10, policy="float32")
    return types.SimpleNamespace(
        trials=trials,
        pipeline=types.SimpleNamespace(turns=turns, share=0.5, attempted=0, skipped=0),
        casts=None,
        padded=None,
        policy="float32",
        footprints=[own],
    )


@pytest.mark.parametrize("kind", Change)
def test_what_a_diagnosis_advises(kind, monkeypatch):
    ratio = types.SimpleNamespace(median=0.5, low=0.4, high=0.6)
    turns = types.SimpleNamespace(verdict="faster", ratio=ratio)
    trial = Trial(kind, turns, policy="float32")

    def said():
        return [
            line.replace(f"{trial.name}: 0.5", "0.5").replace(trial.advice, "") for line in advice(diagnosis([trial]))
        ]

    found = said()
    monkeypatch.setattr(timing, "_CHANGES", {one: (misleading(), misleading()) for one in Change})
    assert said() == found
    assert any("input pipeline" in line for line in found) is (kind is not Change.PREFETCH)
    assert any("0.50 times the time." in line for line in found[1:]) is (kind is Change.RECOMPUTE)


def test_what_is_a_note():
    hurts, harmless = Finding("a", "it hurts.", "so.", "do.", Rule.LOSS), note("a", "it is.", "so.", "do.", Rule.LOSS)
    assert (hurts.is_note, harmless.is_note) == (False, True)
    assert (harmless.severity, harmless.finding) == (Severity.NOTE, "note: it is.")
    assert (reworded(hurts).is_note, reworded(harmless).is_note) == (False, True)
