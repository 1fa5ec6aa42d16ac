"""Guards that a run stopped at step 5 and gone on with in a new process ends at step 10 as one that never stopped.

Every case of `resume_cases` is compared bit for bit: losses, every component of every variable, counters, the next
batch. The controls leave one part of a checkpoint out, and must be seen.
"""

import functools
import gc
import json

import pytest
import resume_cases
import tensorflow as tf
from processes import server, start
from replica_cases import components
from resume_cases import CASES, END, STOP, Run, prepare

from loops.loop.state import folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By case: what the uninterrupted run here comes to, and the resumed one of a new process. And their folder."""
    place = tmp_path_factory.mktemp("runs")
    server()

    @functools.cache
    def whole(name):
        found = resume_cases.first(place, name)
        gc.collect()  # An iterator that lives while a process is waited for ends seconds later.
        return found

    @functools.cache
    def resumed(name):
        whole(name)
        process = start(resume_cases.main, place, name)
        process.join(500)
        assert process.exitcode == 0
        return json.loads((place / f"{name}.json").read_text())

    return whole, resumed, place


@pytest.mark.dear("two runs in processes of their own")
@pytest.mark.slow_with("hand-written")
@pytest.mark.exhaustive_with("hand-written", "graph on 2", "python on 2")
@pytest.mark.parametrize("case", CASES)
def test_five_steps_and_five_in_a_new_process_are_ten(runs, case):
    """Saved after a skip, but for one in mid-window, and by a thread in two of them."""
    whole, resumed, place = runs
    assert resumed(case) == whole(case)
    assert list(resumed(case)["losses"]) == [str(step) for step in range(STOP + 1, END + 1)]
    windows = END // CASES[case].accumulate
    assert whole(case)["counters"] == str(resume_cases.loops.Counters(END, windows, windows - 1))
    assert folder.read_facts(folder.prefix(place / case, STOP))["counters"]["skipped"] == 1


@pytest.fixture(scope="module")
def control(runs, tmp_path_factory):
    """Goes on to the end after leaving something out."""
    whole, _, place = runs
    made = {}

    def go_on(name, leave_out):
        expected = whole(name)
        if name not in made:
            prepare(2)
            run = Run(CASES[name], tmp_path_factory.mktemp("control"))
            state = run.loop.state({})
            fresh = {id(v): v.numpy() for group in state.groups.values() for v in group}
            generator = tf.random.get_global_generator()
            checkpoint, iterator = tf.train.Checkpoint(**state.trackables()), run.loop.position.iterator
            made[name] = run, state, fresh, checkpoint, generator, iterator
        run, state, fresh, checkpoint, generator, of_checkpoint = made[name]
        tf.random.set_global_generator(generator)  # Another run may have brought its own since.
        path = folder.prefix(place / name, STOP)
        state.restore(checkpoint, path, folder.read_facts(path))
        leave_out(run, state, lambda variables: [v.assign(fresh[id(v)]) for v in variables])
        run.losses.clear()
        iterator = run.loop.position.iterator
        found = run.go(END).fingerprint()
        if iterator is not of_checkpoint:
            del made[name]  # The next restore would not reach this iterator.
        return found, expected

    return go_on


@pytest.mark.slow_with("hand-written")
@pytest.mark.exhaustive_with("graph on 2", "hand-written")
@pytest.mark.parametrize("name", ["graph on 2", "hand-written"])
def test_with_nothing_left_out_the_control_sees_no_difference(control, name):
    """And what is saved differs between replicas: statistics and sums."""
    restored = []

    def keep(run, state, reset):
        of_window = run.step.window.variables
        restored.append([components(run.model.non_trainable_variables), components(of_window)])

    found, whole = control(name, keep)
    assert found == whole
    if name == "graph on 2":
        for variables in restored[0]:
            assert any((parts[0] != parts[1]).any() for parts in variables if len(parts) == 2)


LEFT_OUT = {
    **{
        group: lambda run, state, reset, group=group: reset(state.groups[group])
        for group in ("model", "optimizer", "masters", "loss_scaler", "window")
    },
    "counters": lambda run, state, reset: run.loop._counters.data.assign(STOP - 1),
    "position": lambda run, state, reset: run.loop.position.skip_to(0),
    "seed generators": lambda run, state, reset: reset(
        [v for v in state.groups["model"] if "seed_generator" in v.name or v.dtype == tf.int64]
    ),
    "the second replica's statistics": lambda run, state, reset: [
        v.value.values[1].assign(v.value.values[0]) for v in run.model.non_trainable_variables if "moving" in v.path
    ],
    "the second replica's sums": lambda run, state, reset: [
        v.values[1].assign(v.values[0]) for v in run.step.window.variables if "sum" in v.name
    ],
}


@pytest.mark.slow_with("the second replica's sums")
@pytest.mark.exhaustive_with(*LEFT_OUT.keys() - {"the second replica's sums"})
@pytest.mark.parametrize("part", LEFT_OUT)
def test_a_part_left_out_is_seen(control, part):
    found, whole = control("graph on 2", LEFT_OUT[part])
    assert found != whole
    # Training does not read BatchNorm's statistics: the losses are the same without them, the model is not.
    if part not in ("counters", "loss_scaler", "the second replica's statistics"):
        assert found["losses"] != whole["losses"]


@pytest.mark.slow
def test_of_a_step_that_hides_its_parts_all_is_saved(control):
    """Its variables are found in its graph, so that none is forgotten; a global generator left out is seen."""

    def leave_out(run, state, reset):
        (saved,) = state.groups.values()
        used = [one if isinstance(one, tf.Variable) else one.value for one in run.variables()]
        saved = {id(variable) for variable in saved}
        # But for those of weighted losses and of windows that end early, which this step does not use.
        missing = [one.name for one in used if id(one) not in saved]
        assert sorted(missing) == ["ends:0", "loss:0", "weight:0"]
        assert len(saved) == len({id(one) for one in used}) - len(missing) + 1  # The state of the generator.
        tf.random.get_global_generator().reset_from_seed(2)

    found, whole = control("hand-written", leave_out)
    assert found["losses"] != whole["losses"]


@pytest.mark.slow
def test_a_run_goes_on_in_the_same_process_too(runs, tmp_path):
    prepare(1)
    run = Run(CASES["skip just before"], tmp_path)
    for steps in (2, STOP, STOP, END):
        run.go(steps)
    assert run.fingerprint() == runs[0]("skip just before")
    assert folder.numbers(tmp_path) == [END, STOP, 2]
    assert list(run.losses) == [str(step) for step in range(1, END + 1)]
