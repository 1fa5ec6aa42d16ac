"""Two processes of a `MultiWorkerMirroredStrategy` on the loopback interface, each of which overflows in turn.

Guards against workers that decide for themselves: one that applies while the other skips has different weights, and
one that waits for a reduction the other never reaches hangs, which ends in a failure here.
"""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf

import scaler

HERE = pathlib.Path(__file__).parent
SECONDS = 240
APPLIED = [True, False, True, False, True, False, False]


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_workers(folder):
    """The reports of both workers. Both are killed if one takes too long or fails."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    root = str(pathlib.Path(scaler.__file__).parents[1])
    processes, logs = [], []
    try:
        for index in (0, 1):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, "TF_CONFIG": json.dumps(task), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
            logs.append((folder / f"{index}.log").open("w+"))
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "worker.py"), str(folder / f"{index}.json")],
                    env=environment,
                    stdout=logs[-1],
                    stderr=subprocess.STDOUT,
                )
            )
        for index, process in enumerate(processes):
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = f"nothing within {SECONDS} seconds"
            if code != 0:
                pytest.fail(f"worker {index} returned {code}:\n{(folder / f'{index}.log').read_text()[-3000:]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    return [json.loads((folder / f"{index}.json").read_text()) for index in (0, 1)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_workers(tmp_path_factory.mktemp("workers"))


@pytest.mark.parametrize("name", ["written", "written in tf.range"])
def test_hand_written_steps_skip_on_both(reports, name):
    first, second = (report[name] for report in reports)
    assert first["applied"] == second["applied"] == APPLIED * 2
    assert first["unmoved"] == second["unmoved"] == [not applied for applied in APPLIED * 2]
    assert first["finite"]
    assert second["finite"]
    assert first["loss_scale"] == second["loss_scale"] == 2.0 ** (10 - 8)
    assert first["counters"] == second["counters"] == [15, 7, 8, 2]
    assert first["cause"] == second["cause"] == scaler.Cause.LOSS
    assert first["weights"] == second["weights"]
    assert first["statistics"] != second["statistics"]


def test_loops_skip_on_both(reports):
    first, second = (report["Loop"] for report in reports)
    assert first == second
    assert first["applied"] == APPLIED
    assert first["finite"]
    assert first["loss_scale"] == cases.LOSS_SCALE["float32"] / 2**4


def test_a_window_is_skipped_on_both(reports):
    first, second = (report["Loop with accumulation"] for report in reports)
    assert first == second
    assert not any(first["applied"])
    assert first["finite"]
    assert first["counters"] == [2, 1, 1, 1]


def test_as_one_process_on_the_concatenated_batch(reports):
    adam = functools.partial(keras.optimizers.Adam, 0.01)
    one = cases.Rig(tf.distribute.get_strategy(), cases.dense_model, adam, clip_norm=0.5)
    one.run([cases.batch(99)] * 6)  # As many as an in-graph loop of 7 steps is traced with.
    one.run([cases.batch(number) for number in (0, 2, 4)])
    expected = [part for parts in cases.components(one.weights()) for part in parts]
    for worker in reports:
        for ours, theirs in zip(worker["Loop"]["weights"], expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
