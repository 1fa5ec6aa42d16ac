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


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--checkpoint-every", 5, "--resume", "--strategy", "static:8"], 1, "run.strategy was 'dynamic'"),
        (["--resume"], 2, "--checkpoint-every N"),
    ],
    ids=["strategy", "no interval"],
)
def test_what_cannot_be_resumed_is_one_line_and_harms_nothing(capsys, uninterrupted, arguments, status, named):
    before = contents(uninterrupted)
    found, printed, errors = run(
        capsys, "train", "digits", "--policy", "float16", "--steps", 30, *arguments, "--out", uninterrupted
    )
    assert (found, printed) == (status, "")
    last = errors.strip().splitlines()[-1]
    assert last.startswith("halfstep: ")
    assert named in last
    assert contents(uninterrupted) == before


def contents(place):
    """All files but TensorFlow's list of the checkpoints, which may be written anew."""
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "checkpoint"}


def test_inspect_shows_what_a_checkpoint_holds(capsys, uninterrupted):
    status, printed, _ = run(capsys, "inspect", uninterrupted)
    assert status == 0
    for text in (
        f"checkpoint   {uninterrupted}/checkpoints/ckpt-30  ",
        "others       25, 20",
        "counters     data 30  attempted 30  applied 30  skipped 0",
        "loss scaler  loss_scale 32768  good_steps 30",
        "strategy     Dynamic(initial_scale=32768.0",
        "optimizer    class Adam  learning_rate 0.00999",
        "run          task digits  policy float16  strategy dynamic  seed 0",
        "data         30 batches taken; position saved",
        "model        17 variables, 15,578 values",
        "random       seed_generators 0",
        "actions      JsonLines, _LastLosses",
        "versions     tensorflow 2.",
    ):
        assert text in printed


def test_inspect_prints_json_alone_also_of_the_folder_itself(capsys, uninterrupted):
    found = [
        json.loads(run(capsys, "inspect", place, "--json")[1])
        for place in (uninterrupted, uninterrupted / "checkpoints")
    ]
    assert found[0] == found[1]
    assert found[0]["step"] == 30
    assert found[0]["counters"] == {"data": 30, "attempted": 30, "applied": 30, "skipped": 0}
    assert found[0]["loss_scaler"]["loss_scale"] == 2.0**15
    assert found[0]["data"] == {"batches": 30, "problem": None, "caveats": []}
    assert found[0]["variables"]["model"] == {"count": 17, "values": 15578}
    assert set(found[0]["random"]) == {
        "seed_generators", "tf_generator", "keras_generator", "op_seeds", "python", "numpy"
    }  # fmt: skip
    assert found[0]["bytes"] > 4 * 15578


def test_inspect_names_what_it_cannot_read(capsys, tmp_path, uninterrupted):
    status, printed, errors = run(capsys, "inspect", tmp_path / "none")
    assert (status, printed) == (1, "")
    assert errors.startswith(f"halfstep: {tmp_path}/none: no checkpoint. Name the folder that was given to hs.Ch")
    assert errors.count("\n") == 1
    path = tmp_path / "ckpt-4.index"
    path.write_bytes(b"torn")
    status, printed, errors = run(capsys, "inspect", tmp_path)
    assert (status, printed) == (1, "")
    assert "none of its checkpoints can be read (step 4: " in errors


def test_inspect_shows_a_damaged_newest_one(capsys, tmp_path, uninterrupted):
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "copy")
    (tmp_path / "copy" / "ckpt-30.index").write_bytes(b"torn")
    status, printed, _ = run(capsys, "inspect", tmp_path / "copy")
    assert status == 0
    assert "ckpt-25  " in printed
    assert "damaged      step 30: " in printed
    assert "others       20\n" in printed
