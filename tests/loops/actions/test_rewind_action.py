"""Guards `loops.Rewind`: a run that goes back ends with the bits of one over data without the batches it left out."""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import afresh, line
from models import squared_error
from rigs import raw

import loops
import scaler
from loops.actions import rewind as rewinding
from loops.actions.rewind import NAME, UNDER_WAY, LeftOut, next_of
from loops.loop.state import folder
from loops.run.rewind import rewind

BATCHES, BAD = 60, (15, 16, 18)


def batches():
    """Batches of a plane, some of them with targets a thousand times too large."""
    x = np.random.default_rng(0).normal(size=(BATCHES, 8, 4)).astype(np.float32)
    y = np.tanh(x.sum(axis=-1, keepdims=True)).astype(np.float32)
    for number in BAD:
        y[number - 1] *= 1e3
    return x, y


@functools.cache
def guarded():
    """A step that a guard of spikes watches, and loops of it."""
    guard = scaler.LossScaler(scaler.SpikeGuard(scaler.NoScaling(), window=10, share=0.3))
    step = loops.TrainStep(line(), squared_error, keras.optimizers.SGD(1e-3, momentum=0.9), loss_scaler=guard)
    return step, afresh(step, tf.data.Dataset.from_tensor_slices(batches()), steps_per_call=1)


class Run:
    """A program from its start, over all batches or some of them."""

    def __init__(self, folder, kept=None, *, every=6, keep=2, resume=False, **arguments):
        data = tuple(part if kept is None else part[kept] for part in batches())
        saves = loops.Checkpoint(folder / "ckpt", every=every, keep=keep, resume=resume)
        goes_back = [] if kept is not None else [loops.Rewind(**{"to": 5, "skip": 12, **arguments})]
        self.step, again = guarded()
        log = loops.JsonLines(folder / "steps.jsonl")
        self.loop = again(tf.data.Dataset.from_tensor_slices(data), log, *goes_back, saves)

    def run(self, steps):
        self.loop.run(steps)
        return raw(self.step.model.variables, self.step.optimizer.variables, self.step.loss_scaler.variables)


def test_a_run_that_is_stopped_and_resumes_is_the_same(tmp_path):
    """After it went back, to a checkpoint that the save of the same visit did not remove."""
    Run(tmp_path).run(21)
    bits = Run(tmp_path, resume=True).run(25)
    assert listed(tmp_path / "ckpt") == [{"first": 10, "last": 21, "rewound_to": 6}]
    assert folder.numbers(tmp_path / "ckpt") == [25, 24]
    assert bits == Run(tmp_path / "clean", np.r_[0:9, 21:BATCHES], every=99).run(25)


def test_the_next_batches_to_leave_out():
    entries = [LeftOut(10, 12), LeftOut(3, 5), LeftOut(6, 6, 2), LeftOut(3, 4, 1)]
    assert next_of(entries, 0) == LeftOut(3, 6)
    assert next_of(entries, 3) == LeftOut(4, 6)
    assert next_of(entries, 6) == LeftOut(10, 12)
    assert next_of(entries, 12) is None


@pytest.mark.exhaustive
def test_a_step_after_what_was_left_out_is_not_replayed_wrongly(tmp_path):
    """Its checkpoint is from before, and a replay would take other batches."""
    Run(tmp_path, every=4, keep=20).run(25)
    with pytest.raises(loops.LoopError, match=r"step 11: batches 10 to 21 .* left out between it and .* step 8"):
        rewind(Run(tmp_path).loop, 11)
    moment = rewind(Run(tmp_path).loop, 7)
    assert (moment.began_at, moment.reproduced) == (4, True)


@functools.cache
def told(steps_per_call):
    """A step that says which batches it was given, and is told by their sign which of them are spikes."""
    given = tf.Variable(tf.zeros([60], tf.int32))

    def step(number):
        given.scatter_nd_update([[tf.abs(number) - 1]], [1])
        return {"cause": tf.where(number < 0, int(scaler.Cause.SPIKE), int(scaler.Cause.NONE))}

    return given, afresh(step, tf.data.Dataset.range(60), steps_per_call=steps_per_call)


class Cheap:
    """A program from its start, with a step that only counts."""

    def __init__(self, place, bad=(), *, actions=(), steps_per_call=1, **arguments):
        rewind = loops.Rewind(**{"to": 4, "skip": 6, "spikes": 2, **arguments})
        saves = loops.Checkpoint(place, every=2, keep=9, resume=True)
        data = tf.data.Dataset.from_tensor_slices([-n if n in bad else n for n in range(1, 61)])
        self.given, again = told(steps_per_call)
        self.loop = again(data.map(lambda n: tf.cast(n, tf.int64)), *actions, rewind, saves)

    def run(self, steps):
        self.loop.run(steps)
        return (np.flatnonzero(self.given.numpy()) + 1).tolist()


def listed(place):
    return json.loads((place / NAME).read_text())["skip"]


def test_spikes_inside_of_a_call_are_gone_behind_as_well(tmp_path):
    """It is saved after calls: the checkpoint is older than the batches that are left out."""
    given = Cheap(tmp_path, bad=(11, 12), steps_per_call=4).run(14)
    assert listed(tmp_path) == [{"first": 7, "last": 12, "rewound_to": 4}]
    assert given == [*range(1, 7), *range(13, 21)]


@pytest.mark.slow
def test_one_spike_is_left_to_the_guard(tmp_path):
    assert Cheap(tmp_path, bad=(11, 17)).run(20) == list(range(1, 21))
    assert not (tmp_path / NAME).exists()


@pytest.mark.slow
def test_a_rewind_to_before_the_first_checkpoint_is_refused_and_nothing_is_lost(tmp_path):
    with pytest.raises(loops.LoopError, match="spikes began at step 5, and no checkpoint is at or before step 1: the"):
        Cheap(tmp_path, bad=(5, 6)).run(9)
    assert not (tmp_path / NAME).exists()
    assert folder.numbers(tmp_path) == [6, 4, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "arguments", "error", "said"),
    [
        (range(11, 61), {"most": 1}, loops.LoopError, "went back 1 times, and spikes came again"),
        ((11, 12), {"skip": 200}, loops.OutOfData, "while Rewind left some of them out"),
    ],
)
def test_what_it_cannot_go_on_from_is_named(tmp_path, bad, arguments, error, said):
    with pytest.raises(error, match=said):
        Cheap(tmp_path, bad, **arguments).run(30)


@pytest.mark.parametrize("text", ["[]", "{}", '{"skip": [[1, 2]]}', '{"skip": [{"first": 3, "last": 2}]}', "{"])
def test_a_file_of_another_form_is_refused(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(loops.LoopError, match=NAME):
        Cheap(tmp_path).run(1)


def test_a_copied_note_of_a_rewind_takes_nothing_back(tmp_path):
    """A person who adds a line copies the documented one, with a step that exists, one between, and an old one."""
    assert Cheap(tmp_path).run(8) == list(range(1, 9))
    saved = folder.numbers(tmp_path)
    for back in (4, 3):
        (tmp_path / NAME).write_text(json.dumps({"skip": [{"first": 10, "last": 13, "rewound_to": back}]}))
        Cheap(tmp_path).run(8)
        assert folder.numbers(tmp_path) == saved
    assert Cheap(tmp_path).run(10) == [*range(1, 10), 14]


@pytest.mark.slow_with("after the file", "after the save")
@pytest.mark.parametrize("moment", ["before the file", "after the file", "after the save"])
def test_a_kill_while_it_goes_back_loses_nothing(tmp_path, monkeypatch, moment):
    class Killed(BaseException):
        pass

    def killed(*arguments):
        raise Killed

    write, cheap = rewinding._write_left_out, Cheap(tmp_path, bad=(11, 12))
    with monkeypatch.context() as patch:
        if moment == "after the save":
            patch.setattr(loops.Checkpoint, "go_back", killed)
        else:

            def written(place, entries, name=NAME):
                if moment == "after the file" or name != NAME:
                    write(place, entries, name)
                if name == NAME:
                    raise Killed

            patch.setattr(rewinding, "_write_left_out", written)
        with pytest.raises(Killed):
            cheap.run(14)
    assert (tmp_path / UNDER_WAY).exists()
    assert Cheap(tmp_path, bad=(11, 12)).run(14) == [*range(1, 7), *range(13, 21)]
    assert listed(tmp_path) == [{"first": 7, "last": 12, "rewound_to": 6}]
    assert not (tmp_path / UNDER_WAY).exists()


def test_a_run_that_was_going_back_to_a_lost_checkpoint_keeps_the_others(tmp_path):
    Cheap(tmp_path).run(8)
    (tmp_path / UNDER_WAY).write_text('{"skip": [{"first": 3, "last": 5, "rewound_to": 3}]}')
    with pytest.raises(loops.LoopError, match=r"going back to step 3, and that checkpoint is gone\. Remove this file"):
        Cheap(tmp_path).run(9)
    assert folder.numbers(tmp_path) == [8, 6, 4, 2]
    (tmp_path / UNDER_WAY).unlink()
    assert Cheap(tmp_path).run(9) == list(range(1, 10))


def test_a_line_that_a_person_adds_while_it_runs_stays(tmp_path):
    def edit(visit):
        if visit.counters.data == 8 and not (tmp_path / NAME).exists():
            (tmp_path / NAME).write_text('{"skip": [{"first": 15, "last": 16}]}')

    given = Cheap(tmp_path, bad=(11, 12), actions=[edit]).run(14)
    assert listed(tmp_path) == [{"first": 15, "last": 16}, {"first": 7, "last": 12, "rewound_to": 6}]
    assert given == [*range(1, 7), 13, 14, *range(17, 23)]


def test_numbers_of_spikes_that_never_come_together_are_refused(tmp_path):
    with pytest.raises(scaler.InvalidArgument, match=r"Rewind\(to=2, spikes=3\): expected no more spikes than steps"):
        loops.Rewind(to=2, skip=9)
    run = Run(tmp_path, spikes=4)
    with pytest.raises(
        scaler.InvalidArgument,
        match=r"Rewind\(spikes=4\) with SpikeGuard\(window=10, share=0.3\): the guard allows 3 spikes in a row",
    ):
        run.run(9)


def test_what_it_needs_is_named(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(batches())

    def step(x, y):
        return {"loss": tf.reduce_mean(x)}

    with pytest.raises(scaler.InvalidArgument, match=r"no hs\.Checkpoint"):
        loops.Loop(step, data, actions=[loops.Rewind(to=5, skip=9)]).run(1)
    actions = [loops.Rewind(to=5, skip=9), loops.Checkpoint(tmp_path, every=5)]
    with pytest.raises(scaler.InvalidArgument, match="returns no 'cause'"):
        loops.Loop(step, data, actions=actions).run(1)
    with pytest.raises(scaler.InvalidArgument, match="skip=5"):
        loops.Rewind(to=5, skip=5)
