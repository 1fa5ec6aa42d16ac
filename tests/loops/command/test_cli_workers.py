"""Guards `halfstep train --workers`: what it starts, what it passes on, and how it says that one of them failed.

A script stands for the worker's command, but in the one slow test, where a worker of a real run is killed.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

import halfstep as cli
import loops
from halfstep.commands import train

SCRIPT = """#!/bin/sh
echo "$@" > arguments.$HALFSTEP_LAUNCHED.$(echo "$TF_CONFIG" | sed 's/.*"index": \\([0-9]*\\).*/\\1/')
case "$TF_CONFIG" in *'"index": 1'*) {second} ;; *) {first} ;; esac
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Launches two scripts that do as they are told."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_GRACE", 0.5)

    def run(first, second):
        script = tmp_path / "worker"
        script.write_text(SCRIPT.format(first=first, second=second))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))
        train.launch(["train", "digits", "--workers", "2"], 2)

    return run


def test_each_worker_is_the_same_command(launched, tmp_path):
    launched("true", "true")
    for index in (0, 1):
        said = (tmp_path / f"arguments.1.{index}").read_text()
        assert said == "-m halfstep train digits --workers 2 --workers 1\n"


@pytest.mark.parametrize(
    ("first", "second", "error", "named"),
    [
        ("exit 75", "kill -9 $$", loops.WorkerLost, "worker 1 was ended by SIGKILL.*--resume"),
        ("kill -9 $$", "exit 75", loops.WorkerLost, "worker 0 was ended by SIGKILL"),
        ("exit 1", "exit 75", loops.LoopError, "worker 0 stopped with the error above"),
        ("exit 75", "exit 1", loops.LoopError, "worker 1 stopped with the error above"),
        ("exit 75", "exit 75", loops.WorkerLost, "lost each other"),
        ("exit 1", "exec sleep 60", loops.LoopError, "worker 0 stopped with the error above"),
        ("exit 143", "exit 143", SystemExit, "143"),
        ("exit 2", "exit 2", SystemExit, "2"),
        ("exit 130", "exit 130", KeyboardInterrupt, "^$"),
    ],
)
def test_what_went_wrong_is_said_for_all(launched, first, second, error, named):
    with pytest.raises(error, match=named):
        launched(first, second)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_every_worker_once(launched, tmp_path, number, status):
    caught = f"trap 'echo caught >> signals; exit {status}' {number.name[3:]}; while :; do sleep 0.05; done"

    def send():
        while not all((tmp_path / f"arguments.1.{index}").exists() for index in (0, 1)):
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt if status == 130 else SystemExit):
        launched(caught, caught)
    thread.join()
    assert (tmp_path / "signals").read_text() == "caught\n" * 2
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("arguments", "config", "named"),
    [
        (["--workers", "3"], "", "--workers 3: digits has batches of 64"),
        (["--workers", "2"], '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}', "TF_CONFIG"),
        ([], '{"cluster": 1}', "TF_CONFIG="),
        (["--workers", "2", "--policy", "nonsense"], "", "policy 'nonsense'"),
    ],
)
def test_what_makes_no_sense_has_status_2(capsys, monkeypatch, tmp_path, arguments, config, named):
    monkeypatch.setenv("TF_CONFIG", config)
    assert cli.main(["train", "digits", "--out", str(tmp_path), *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("halfstep: ")
    assert named in errors


@pytest.mark.slow
def test_a_worker_whose_peer_does_not_come_has_status_75(capsys, monkeypatch, tmp_path):
    (port, other) = train._free_ports(2)
    cluster = {"worker": [f"127.0.0.1:{port}", f"127.0.0.1:{other}"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert cli.main(["train", "digits", "--out", str(tmp_path / "run"), "--wait", "1"]) == 75
    assert f"worker 1 at 127.0.0.1:{other}: Connection refused" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_killed_worker_and_the_same_command_again_is_the_undisturbed_run(tmp_path):
    def command(out, steps):
        arguments = ["--policy", "float16", "--workers", "2", "--checkpoint-every", "5", "--resume", "--out", str(out)]
        return [sys.executable, "-m", "halfstep", "train", "digits", "--steps", str(steps), *arguments]

    def digest(out):
        return json.loads((out / "summary.json").read_text())["weights_digest"]

    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    subprocess.run(command(whole, 40), check=True, timeout=500, capture_output=True)
    # More steps than it can take before it is killed.
    process = subprocess.Popen(command(disturbed, 100_000), stderr=subprocess.PIPE, text=True)
    saved = disturbed / "checkpoints" / "worker-1"
    while process.poll() is None and not list(saved.glob("ckpt-*.index")):
        time.sleep(0.05)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children, encoding="utf-8") as file:
        os.kill(max(map(int, file.read().split())), signal.SIGKILL)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 75
    assert "halfstep: worker 0 waits for another of the 2 workers, which is gone" in errors
    assert "was ended by SIGKILL, and with it the run." in errors
    if max(int(path.stem[5:]) for path in saved.glob("ckpt-*.index")) > 40:
        pytest.skip("the machine was too slow to kill it within its first 40 steps")
    subprocess.run(command(disturbed, 40), check=True, timeout=500, capture_output=True)
    assert digest(disturbed) == digest(whole)
