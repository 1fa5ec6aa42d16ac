"""Guards `halfstep train --checkpoint-every N --resume` and `halfstep inspect`, with processes really killed."""

import json
import os
import shutil
import signal

import pytest
from command_cases import run
from crash_cases import command
from processes import start, wait_for

import halfstep as cli
from loops.loop.state import folder

pytestmark = pytest.mark.slow

RUN = ("train", "digits", "--policy", "float16", "--steps", 30, "--checkpoint-every", 5, "--json")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that was let alone, told to resume where there was nothing."""
    out = tmp_path_factory.mktemp("uninterrupted")
    assert cli.main([*map(str, RUN), "--resume", "--out", str(out)]) == 0
    return out


def stopped(out, number, *arguments):
    """The exit status of a run that is sent a signal after its first checkpoint."""
    process = start(command, out, *arguments, "--out", out / "run")
    wait_for(lambda: folder.numbers(out / "run" / "checkpoints"), process=process)
    os.kill(process.pid, number)
    process.join(120)
    return process.exitcode


@pytest.mark.exhaustive_with("15-143", "9--9")
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)],
)
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(capsys, tmp_path, uninterrupted, number, status):
    # Enough steps that it cannot end before the signal comes; resumed, it has as many as the uninterrupted run.
    longer = [*RUN[:5], 100_000, *RUN[6:]]
    assert stopped(tmp_path, number, *longer, "--resume") == status
    out = tmp_path / "run"
    assert not (out / "summary.json").exists()
    at = folder.numbers(out / "checkpoints")[0]
    if number != signal.SIGKILL:
        assert at == (out / "steps.jsonl").read_text().count("\n")
        errors = (tmp_path / "errors.txt").read_text().strip().splitlines()[-1]
        assert errors.startswith("halfstep: ")
        assert errors.endswith("ed; what was written so far is kept.")
    if at > 30:
        pytest.skip("the machine was too slow to stop it within its first 30 steps")
    found, printed, errors = run(capsys, *RUN, "--resume", "--out", out)
    assert found == 0, errors
    assert json.loads(printed) == json.loads((uninterrupted / "summary.json").read_text())
    assert (out / "steps.jsonl").read_text() == (uninterrupted / "steps.jsonl").read_text()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("saved")
    assert cli.main(["train", "digits", "--steps", "6", "--checkpoint-every", "2", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--checkpoint-every", 2, "--resume", "--strategy", "static:8"], 1, "run.strategy was 'dynamic'"),
        (["--resume"], 2, "--checkpoint-every N"),
    ],
    ids=["strategy", "no interval"],
)
def test_what_cannot_be_resumed_is_one_line_and_harms_nothing(capsys, saved, arguments, status, named):
    before = contents(saved)
    found, printed, errors = run(capsys, "train", "digits", "--steps", 6, *arguments, "--out", saved)
    assert (found, printed) == (status, "")
    last = errors.strip().splitlines()[-1]
    assert last.startswith("halfstep: ")
    assert named in last
    assert contents(saved) == before


def contents(place):
    """All files but TensorFlow's list of the checkpoints, which may be written anew."""
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "checkpoint"}


def test_checkpoints_every_0_steps_is_status_2(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", "digits", "--checkpoint-every", "0"])
    assert exit.value.code == 2
    assert "'0': expected an integer of at least 1" in capsys.readouterr().err


def test_inspect_shows_what_a_checkpoint_holds(capsys, saved):
    status, printed, _ = run(capsys, "inspect", saved)
    assert status == 0
    for text in (
        f"checkpoint   {saved}/checkpoints/ckpt-6  ",
        "others       4, 2",
        "counters     data 6  attempted 6  applied 6  skipped 0",
        "loss scaler  loss_scale 32768  good_steps 6",
        "strategy     Dynamic(initial_scale=32768.0",
        "optimizer    class Adam  learning_rate 0.00999",
        "run          task digits  policy mixed_float16  strategy dynamic  seed 0",
        "data         6 batches taken; position saved",
        "model        17 variables, 15,578 values",
        "random       seed_generators 0",
        "actions      JsonLines, _LastLosses",
        "versions     tensorflow 2.",
    ):
        assert text in printed


def test_inspect_prints_json_alone_also_of_the_folder_itself(capsys, saved):
    found = [json.loads(run(capsys, "inspect", place, "--json")[1]) for place in (saved, saved / "checkpoints")]
    assert found[0] == found[1]
    assert found[0]["step"] == 6
    assert found[0]["counters"] == {"data": 6, "attempted": 6, "applied": 6, "skipped": 0}
    assert found[0]["loss_scaler"]["loss_scale"] == 2.0**15
    assert found[0]["data"] == {"batches": 6, "problem": None, "caveats": []}
    assert found[0]["variables"]["model"] == {"count": 17, "values": 15578}
    assert set(found[0]["random"]) == {
        "seed_generators", "tf_generator", "keras_generator", "op_seeds", "python", "numpy"
    }  # fmt: skip
    assert found[0]["bytes"] > 4 * 15578


def test_inspect_names_what_it_cannot_read(capsys, tmp_path, saved):
    status, printed, errors = run(capsys, "inspect", tmp_path / "none")
    assert (status, printed) == (1, "")
    assert errors.startswith(f"halfstep: {tmp_path}/none: no checkpoint. Name the folder that was given to hs.Ch")
    assert errors.count("\n") == 1
    path = tmp_path / "ckpt-4.index"
    path.write_bytes(b"torn")
    status, printed, errors = run(capsys, "inspect", tmp_path)
    assert (status, printed) == (1, "")
    assert "none of its checkpoints can be read (step 4: " in errors


def test_inspect_shows_a_damaged_newest_one(capsys, tmp_path, saved):
    shutil.copytree(saved / "checkpoints", tmp_path / "copy")
    (tmp_path / "copy" / "ckpt-6.index").write_bytes(b"torn")
    status, printed, _ = run(capsys, "inspect", tmp_path / "copy")
    assert status == 0
    assert "ckpt-4  " in printed
    assert "damaged      step 6: " in printed
    assert "others       2\n" in printed
