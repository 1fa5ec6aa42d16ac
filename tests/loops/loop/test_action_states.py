"""Guards the state of actions in a resumed run: each takes its own in any order, and no file loses its lines."""

import json
import re
import shutil
import warnings

import keras
import pytest
import tensorflow as tf

import loops
from loops.loop.state.actions import ActionStates
from loops.support.written import Place

# What an action keeps does not depend on who takes the steps.
pytestmark = pytest.mark.usefixtures("eagerly")


class Kept:
    """An action with a number as its state."""

    def __init__(self, value=0, **attributes):
        self.value = value
        vars(self).update(attributes)

    def save_state(self):
        return self.value

    def load_state(self, value):
        self.value = value


def resumed(folder, saved, here, place="ckpt"):
    """What each has after a way through a checkpoint."""
    facts = json.loads(json.dumps(ActionStates(saved, folder / place).save()))
    ActionStates(here, folder / place).restore("ckpt-3", facts, 3)
    return [action.value for action in here]


def writing(path):
    return {"writes": Place(path, "file")}


def test_what_an_action_writes_tells_it_from_others(tmp_path):
    a, b = writing(tmp_path / "a"), writing(tmp_path / "b")
    assert resumed(tmp_path, [Kept(1, **a), Kept(2, **b)], [Kept(**b), Kept(**a)]) == [2, 1]
    with pytest.warns(loops.ResumeWarning, match="ckpt-3 has no state of Kept 'b|../b'.*: it starts new"):
        assert resumed(tmp_path, [Kept(1, **a)], [Kept(**b), Kept(**a)]) == [0, 1]


def test_a_folder_that_was_moved_is_the_same(tmp_path):
    saved = ActionStates([Kept(1, **writing(tmp_path / "run" / "a"))], tmp_path / "run" / "ckpt").save()
    # The best checkpoint lies one folder deeper.
    for run, checkpoints in (("other", "ckpt"), ("run", "ckpt/best")):
        here = Kept(**writing(tmp_path / run / "a"))
        ActionStates([here], tmp_path / run / checkpoints).restore("ckpt-3", saved, 3)
        assert here.value == 1


def test_a_name_tells_an_action_from_others(tmp_path):
    saved = [Kept(1, name="one"), Kept(2, name="two")]
    assert resumed(tmp_path, saved, [Kept(name="two"), Kept(name="one")]) == [2, 1]
    with pytest.warns(loops.ResumeWarning, match="no state of Kept 'three'"):
        assert resumed(tmp_path, saved, [Kept(name="three"), Kept(name="two")]) == [0, 2]


def test_an_exact_match_goes_before_a_loose_one(tmp_path):
    saved = [Kept(1, state_keys=["a 1", "a"]), Kept(2, state_keys=["a 2", "a"])]
    assert resumed(tmp_path, saved, [Kept(state_keys=["a 3", "a"]), Kept(state_keys=["a 1", "a"])]) == [2, 1]


def test_without_either_the_order_tells_and_another_number_is_said(tmp_path):
    assert resumed(tmp_path, [Kept(1), Kept(2)], [Kept(), Kept()]) == [1, 2]
    with pytest.warns(loops.ResumeWarning, match="has the state of 2 Kept, and this run has 1: .*`name`"):
        assert resumed(tmp_path, [Kept(1), Kept(2)], [Kept()]) == [1]


def test_a_state_that_two_share_is_not_new_where_one_has_it(tmp_path):
    class Other(Kept):
        pass

    shared = object()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved, here = [Kept(1, state_of=shared)], [Other(state_of=shared), Kept(state_of=shared)]
        assert resumed(tmp_path, saved, here) == [0, 1]
    with pytest.warns(loops.ResumeWarning, match="no state of Other") as said:
        resumed(tmp_path, [], [Other(state_of=shared), Kept(state_of=shared)])
    assert len(said) == 1


def loop(folder, *actions, resume=True):
    """Its losses are the numbers of its steps."""
    loss = tf.Variable(0.0)
    saves = loops.Checkpoint(folder / "ckpt", every=2, resume=resume)
    data = tf.data.Dataset.range(100).repeat()
    return loops.Loop(lambda x: {"loss": loss.assign_add(1.0)}, data, actions=[*actions, saves], steps_per_call=2)


def steps_of(path):
    return loops.observe.read(path).steps.column("step").to_pylist()


WRITERS = {
    loops.JsonLines: lambda path: [json.loads(line)["step"] for line in path.read_text().splitlines()],
    loops.Csv: lambda path: [int(line.split(",")[0]) for line in path.read_text().splitlines()[1:]],
    loops.Trace: steps_of,
}


def writers(folder, name):
    """One of each kind."""
    return [made(folder / f"{name}.{made.__name__}") for made in WRITERS]


def written(folder, name):
    """The steps in the file of each."""
    return [read(folder / f"{name}.{made.__name__}") for made, read in WRITERS.items()]


def each_is_told(said, sentence):
    """Whether there is one warning for each kind of writer."""
    messages = [str(one.message) for one in said]
    return len(messages) == 3 and all(
        re.search(sentence.format(name=made.__name__), message) for made, message in zip(WRITERS, messages, strict=True)
    )


def test_a_writer_that_was_left_out_for_a_while_keeps_its_file(tmp_path):
    loop(tmp_path, *writers(tmp_path, "steps")).run(4)
    loop(tmp_path).run(6)
    shutil.copytree(tmp_path, tmp_path / "other")
    with pytest.warns(loops.ResumeWarning) as said:
        loop(tmp_path, *writers(tmp_path, "steps")).run(8)
    assert each_is_told(said, r"steps\.{name}: the checkpoint of step 6 .* up to (step )?4 are kept")
    assert written(tmp_path, "steps") == [[1, 2, 3, 4, 7, 8]] * 3
    # One that its checkpoint knows nothing of has no step after it.
    for made in WRITERS:
        shutil.copy(tmp_path / f"steps.{made.__name__}", tmp_path / "other" / f"copy.{made.__name__}")
    with pytest.warns(loops.ResumeWarning) as said:
        loop(tmp_path / "other", *writers(tmp_path / "other", "copy")).run(8)
    assert each_is_told(said, r"copy\.{name}: the checkpoint of step 6")
    assert written(tmp_path / "other", "copy") == [[1, 2, 3, 4, 7, 8]] * 3


def test_a_new_writer_before_an_old_one_takes_nothing_from_it(tmp_path):
    loop(tmp_path, *writers(tmp_path, "a")).run(4)
    with pytest.warns(loops.ResumeWarning) as said:
        loop(tmp_path, *writers(tmp_path, "b"), *writers(tmp_path, "a")).run(6)
    assert each_is_told(said, r"b\.{name}: the checkpoint of step 4 was saved without it: it has no")
    assert written(tmp_path, "a") == [[1, 2, 3, 4, 5, 6]] * 3
    assert written(tmp_path, "b") == [[5, 6]] * 3


def test_a_damaged_trace_that_a_checkpoint_does_not_know_is_copied_first(tmp_path):
    path = tmp_path / "trace.arrow"
    loop(tmp_path, loops.Trace(path)).run(4)
    loop(tmp_path).run(6)
    path.write_bytes(b"no trace at all")
    with pytest.warns(loops.ResumeWarning) as said:
        loop(tmp_path, loops.Trace(path)).run(8)
    assert "is damaged after 0 of 15 bytes" in str(said[0].message)
    assert (tmp_path / "trace.arrow.damaged").read_bytes() == b"no trace at all"
    assert steps_of(path) == [7, 8]


def held_out(value):
    return tf.data.Dataset.from_tensors((tf.constant([[value]]), tf.constant([[0.0]])))


def evaluations():
    """Two that measure other data, and what follows the first."""
    one, two = (
        loops.Evaluate(
            lambda x, training: x, held_out(value), [keras.metrics.MeanSquaredError(name="e")], every=2, name=name
        )
        for value, name in ((1.0, "one"), (2.0, "two"))
    )
    return one, two


def test_evaluations_that_changed_places_keep_their_results(tmp_path):
    one, two = evaluations()
    loop(tmp_path, one, two).run(2)
    again, other = evaluations()
    loop(tmp_path, other, again).run(2)
    assert (again.results, other.results) == ({"e": 1.0}, {"e": 4.0})


def test_a_best_that_follows_another_evaluation_starts_new(tmp_path):
    one, two = evaluations()
    loop(tmp_path, one, two, loops.EarlyStop(loops.Best(one, "e", "min"))).run(2)
    one, two = evaluations()
    best = loops.Best(two, "e", "min")
    with pytest.warns(loops.ResumeWarning, match="no state of EarlyStop 'min e of two': it starts new"):
        loop(tmp_path, one, two, loops.EarlyStop(best)).run(4)
    assert (best.value, best.step) == (4.0, 4)


def test_a_best_with_another_min_delta_goes_on(tmp_path):
    one, _ = evaluations()
    loop(tmp_path, one, loops.EarlyStop(loops.Best(one, "e", "min"))).run(2)
    one, _ = evaluations()
    best = loops.Best(one, "e", "min", min_delta=0.5)
    loop(tmp_path, one, loops.EarlyStop(best)).run(4)
    assert (best.step, best.since) == (2, 1)


def test_a_metric_that_an_evaluation_no_longer_has_is_not_shown(tmp_path):
    def one(*names):
        metrics = [keras.metrics.MeanSquaredError(name=name) for name in names]
        return loops.Evaluate(lambda x, training: x, held_out(3.0), metrics, every=2)

    loop(tmp_path, one("e", "f")).run(2)
    other = one("f", "g")
    best = loops.Best(other, "g", "min")
    with pytest.warns(loops.ResumeWarning, match="no state of EarlyStop 'min g of validation'"):
        loop(tmp_path, other, loops.EarlyStop(best)).run(2)
    assert other.results == {"f": 9.0}
    best.look()
    assert best.value is None


@pytest.mark.parametrize(
    ("made", "state"),
    [
        (loops.JsonLines, []),
        (loops.JsonLines, {"step": "x", "line": None}),
        (loops.Trace, {"end": 2**62, "last_skip": 0, "held": 7}),
        (loops.Trace, {"end": 0}),
        (loops.Trace, None),
    ],
)
def test_a_state_of_another_form_is_one_sentence(tmp_path, made, state):
    action = made(tmp_path / "file", every=1)
    (tmp_path / "file").write_text('{"step": 1}\n')
    facts = ActionStates([action], tmp_path / "ckpt").save()
    facts["actions"] = dict.fromkeys(facts["actions"], state)
    with pytest.raises(loops.LoopError) as caught:
        ActionStates([action], tmp_path / "ckpt").restore("ckpt-3", facts, 3)
    assert "\n" not in str(caught.value)
    del facts["actions"]["JsonLines" if made is loops.JsonLines else "Trace"]
    with pytest.raises(loops.CheckpointError, match="cannot take the state that was saved for it"):
        ActionStates([action], tmp_path / "ckpt").restore("ckpt-3", facts, 3)
