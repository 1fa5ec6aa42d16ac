"""Guards what is saved of a source of batches: the place of the batch that was trained last, and what is refused."""

import shutil
import warnings

import numpy as np
import pytest
import resume_cases
from mirrored import mirrored
from processes import kill_when, wait_for
from rewind_cases import counting
from source_cases import InBytes, Loader, Numbered, Run, dataset, expected, plain, without_end

import loops
from loops.loop.fetching import Fetching
from loops.loop.source import Source
from loops.loop.state import folder
from loops.run.rewind import rewind

END = 12


@pytest.mark.parametrize(("make", "steps_per_call"), [(InBytes, 1), (Loader, 4)])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, make, steps_per_call):
    """From a checkpoint behind which the run went on before it was killed, while batches were fetched ahead."""
    source = make()
    run = Run(source, steps_per_call=steps_per_call, folder=tmp_path / "run").go(5)
    assert wait_for(lambda: source.given > 5, 10)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    run.go(END)
    resumed = Run(make(), steps_per_call=steps_per_call, folder=tmp_path / "killed").go(END)
    assert resumed.losses == run.losses[5:]
    assert resumed.weight.numpy().tobytes() == run.weight.numpy().tobytes()


@pytest.mark.parametrize("background", [False, True])
def test_a_position_is_that_of_the_batch_trained_last(tmp_path, background):
    source = Numbered()
    run = Run(source, steps_per_call=3, folder=tmp_path, background=background).go(3)
    assert wait_for(lambda: source.given > 3, 10)
    assert run.position == {"given": 3}
    facts = folder.read_facts(folder.prefix(tmp_path, 3))
    source = facts["data"]["source"]
    assert source == {"name": "Numbered", "length": None, "state": {"given": 3}, "shapes": source["shapes"]}
    assert source["shapes"] == {"seen": [[[2]]], "common": None}


def test_a_position_is_that_of_the_batch_dropped_last():
    source = Numbered()
    batches = Fetching(Source(source))
    batches.record()
    batches.take(2)
    assert wait_for(lambda: source.given == 4, 10)
    batches.drop(1)
    assert batches.state == {"given": 1}


def test_a_source_without_a_state_is_named_and_skipped(tmp_path):
    with pytest.warns(loops.ResumeWarning, match="generator has neither get_state and set_state nor state_dict"):
        Run(plain(), steps_per_call=4, folder=tmp_path).go(5)
    with pytest.warns(loops.ResumeWarning, match="starts the source again and skips the batches"):
        resumed = Run(plain(), steps_per_call=4, folder=tmp_path).go(END)
    assert resumed.losses == pytest.approx(expected(END)[5:])


@pytest.mark.usefixtures("eagerly")
def test_a_source_that_does_not_tell_its_state_is_skipped(tmp_path):
    class Shy(Numbered):
        def get_state(self):
            raise NotImplementedError("not with a shuffle")

    with pytest.warns(loops.ResumeWarning, match=r"Shy does not tell it \(NotImplementedError: not with a shuffle\)"):
        Run(Shy(), folder=tmp_path).go(2)


def test_a_run_at_its_end_is_resumed_there(tmp_path):
    for _ in range(2):
        run = Run(Loader(4), steps_per_call=3, folder=tmp_path)
        with pytest.raises(loops.OutOfData, match="ended after 4 of 9 steps"):
            run.go(9)
    assert run.visits == []


@pytest.mark.slow
def test_a_killed_process_is_gone_on_from(tmp_path):
    kill_when((tmp_path / "ckpt-21.index").exists, without_end, tmp_path)
    # The kill may have torn the newest checkpoint; a warning then says so, and the one before counts.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is damaged", loops.ResumeWarning)
        resumed = Run(Numbered(), steps_per_call=3, folder=tmp_path).go(60)
    assert len(resumed.losses) < 60
    assert resumed.losses == pytest.approx(expected(60)[-len(resumed.losses) :])


@pytest.mark.slow
def test_replicas_share_each_batch(tmp_path):
    """As with a dataset, before and after a resume."""
    whole = Run(dataset(8), steps_per_call=4, strategy=mirrored(2)).go(8)
    run = Run(Numbered(), steps_per_call=4, strategy=mirrored(2), folder=tmp_path).go(5)
    resumed = Run(Numbered(), steps_per_call=4, strategy=mirrored(2), folder=tmp_path).go(8)
    assert [*run.losses, *resumed.losses] == whole.losses


class Refusing(Numbered):
    def set_state(self, state):
        raise ValueError("of another sampler")


class Opaque(Numbered):
    def get_state(self):
        return {"order": [object()]}


@pytest.mark.usefixtures("eagerly")
def test_another_source_is_refused_and_nothing_is_lost(tmp_path):
    whole = Run(Numbered(), folder=tmp_path).go(3)
    for source, said in (
        (InBytes(), "its name was Numbered and is InBytes"),
        (plain(), "this dataset's cannot be saved: generator has neither"),
        (dataset(9), "took its batches from a Numbered"),
    ):
        other = Run(source, folder=tmp_path)
        with pytest.raises(loops.CheckpointError, match=said):
            other.go(6)
        assert other.weight.numpy() == 0.5
    assert Run(Numbered(), folder=tmp_path).go(6).losses == whole.go(6).losses[3:]


@pytest.mark.usefixtures("eagerly")
def test_a_checkpoint_of_a_dataset_is_refused(tmp_path):
    Run(dataset(9), folder=tmp_path).go(2)
    with pytest.raises(loops.CheckpointError, match=r"over a tf\.data\.Dataset, and this one.* from a Numbered"):
        Run(Numbered(), folder=tmp_path).go(4)


@pytest.mark.usefixtures("eagerly")
def test_a_source_of_another_length_is_refused(tmp_path):
    Run(Loader(9), folder=tmp_path).go(3)
    with pytest.raises(loops.CheckpointError, match="its length was 9 and is 8"):
        Run(Loader(8), folder=tmp_path).go(6)
    assert Run(Loader(9), folder=tmp_path).go(6).losses == pytest.approx(expected(6)[3:])


@pytest.mark.usefixtures("eagerly")
@pytest.mark.filterwarnings("ignore::loops.ResumeWarning")
def test_a_source_that_is_too_short_to_skip_is_refused(tmp_path):
    Run(plain(9), folder=tmp_path).go(4)
    with pytest.raises(loops.CheckpointError, match="after 4 batches, and this source of batches has 3"):
        Run(plain(3), folder=tmp_path).go(6)


@pytest.mark.usefixtures("eagerly")
def test_a_source_that_refuses_its_state_says_why(tmp_path, monkeypatch):
    Run(Refusing(), folder=tmp_path).go(3)
    other = Run(Refusing(), folder=tmp_path)
    with pytest.raises(loops.CheckpointError, match=r"Refusing cannot go on .*\(ValueError: of another sampler\)"):
        other.go(6)
    assert other.weight.numpy() == 0.5
    monkeypatch.setattr(Refusing, "set_state", Numbered.set_state)
    assert Run(Refusing(), folder=tmp_path).go(6).losses == pytest.approx(expected(6)[3:])


def test_a_state_that_only_pickle_could_save_is_refused(tmp_path):
    with pytest.raises(loops.CheckpointError, match=r"its state\['order'\]\[0\] is a object.*never unpickled"):
        Run(Opaque(), folder=tmp_path).go(1)
    assert folder.numbers(tmp_path) == []


def test_a_run_is_taken_back_to_one_of_its_steps(tmp_path):
    """Whose batch the source gives again from the checkpoint before it."""

    def made():
        return counting(tmp_path, Numbered(lengths=((),)), steps_per_call=4)

    made().run(12)
    moment = rewind(made(), 11)
    assert (moment.began_at, moment.reproduced, float(moment.batch)) == (8, True, 11)


class Batches(Numbered):
    """Arrays in an order that differs between epochs; the fifth batch overflows."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(5)
        self.x = random.normal(size=(56, 4)).astype(np.float32)
        self.y = random.normal(size=(56, 1)).astype(np.float32)

    def __next__(self):
        epoch, place = divmod(self.given, 7)
        rows = np.random.default_rng([3, epoch]).permutation(56)[8 * place : 8 * place + 8]
        self.given += 1
        return self.x[rows] * (np.float32(np.inf) if self.given == 5 else 1), self.y[rows]


@pytest.mark.slow
def test_a_whole_run_is_resumed_exactly(tmp_path):
    """With dropout, masters and a batch that overflows."""
    case = resume_cases.CASES["skip just before"]
    resume_cases.prepare(1)
    run = resume_cases.Run(case, tmp_path / "whole", dataset=Batches()).go(resume_cases.STOP)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    whole = run.go(resume_cases.END).fingerprint()
    resume_cases.prepare(2)
    resumed = resume_cases.Run(case, tmp_path / "killed", resume=True, dataset=Batches()).go(resume_cases.END)
    assert resumed.fingerprint() == whole
