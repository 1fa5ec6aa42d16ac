"""Guards how a process joins the others: TF_CONFIG is checked, and peers that do not come end it with a sentence."""

import json
import os
import socket
import threading
import time

import pytest
from processes import start
from worker_cases import as_worker, configuration, free_ports, joins_nobody

import loops
import scaler
from loops.loop.workers import addresses, join_workers


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def config(workers=("a:1", "b:2"), kind="worker", index=0, **more):
    return json.dumps({"cluster": {"worker": list(workers), **more}, "task": {"type": kind, "index": index}})


def test_without_a_cluster_there_are_no_addresses(monkeypatch):
    assert addresses() == []
    monkeypatch.setenv("TF_CONFIG", config())
    assert addresses() == ["a:1", "b:2"]


NO_CLUSTERS = {
    "unset": [None, ""],
    "no cluster": ["{", "[]", "{}", json.dumps({"cluster": {"worker": ["a:1"]}})],
    "tasks of other types": [config(ps=["c:3"]), config(kind="evaluator")],
    "addresses": [config(workers=workers) for workers in (["a"], ["a:x"], ["a:70000"], [1], [], ["a:1", "a:1"])],
    "places": [config(index=index) for index in (2, -1, "0", True)],
}


@pytest.mark.parametrize("kind", NO_CLUSTERS)
def test_a_cluster_that_cannot_be_is_named(monkeypatch, kind, snapshot):
    said = {}
    for text in NO_CLUSTERS[kind]:
        if text is not None:
            monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(scaler.InvalidArgument) as caught:
            join_workers(1.0)
        said[text] = str(caught.value)
    assert said == snapshot


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "5", None])
def test_a_time_that_cannot_be_is_named(monkeypatch, seconds):
    monkeypatch.setenv("TF_CONFIG", config())
    with pytest.raises(scaler.InvalidArgument, match=r"join_workers\(.+\): expected a finite number of seconds"):
        join_workers(seconds)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_peers_that_do_not_come_are_named_after_the_time_limit(monkeypatch, index):
    ports = free_ports(3)
    monkeypatch.setenv("TF_CONFIG", configuration(ports, index))
    with pytest.raises(loops.WorkerLost) as caught:
        join_workers(0.3)
    text = str(caught.value)
    assert text.startswith(f"after 0.3 seconds worker {index} cannot reach worker ")
    for other in {0, 1, 2} - {index}:
        assert f"worker {other} at 127.0.0.1:{ports[other]}: Connection refused" in text
    assert f"worker {index} at" not in text


def test_only_the_peer_that_is_missing_is_named(monkeypatch):
    # It is there first, so that its port is none of those that are free.
    with socket.create_server(("127.0.0.1", 0)) as there:
        ports = [*free_ports(2), there.getsockname()[1]]
        monkeypatch.setenv("TF_CONFIG", configuration(ports, 0))
        with pytest.raises(loops.WorkerLost) as caught:
            join_workers(0.3)
    assert "worker 1 at" in str(caught.value)
    assert "worker 2 at" not in str(caught.value)


def test_a_host_without_an_address_is_named(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv("TF_CONFIG", config([f"127.0.0.1:{port}", "no.such.host.invalid:1"]))
    with pytest.raises(loops.WorkerLost, match=r"worker 1 at no\.such\.host\.invalid:1: "):
        join_workers(0.1)


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("TF_CONFIG", config([f"127.0.0.1:{port}", "127.0.0.1:1"]))
        in_use = rf"worker 0 cannot listen on port {port} \(.+\): does an earlier run still use it"
        with pytest.raises(loops.WorkerLost, match=in_use):
            join_workers(5.0)


@pytest.mark.exhaustive
def test_a_peer_that_never_answers_does_not_hang_it_for_ever(tmp_path):
    """TensorFlow waits with all of Python stopped; the process is ended."""
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[1])):
        arguments = (configuration(ports, 0), joins_nobody, 0, tmp_path, 4.0)
        process = start(as_worker, *arguments)
        process.join(60)
        code = process.exitcode
        process.kill()
    assert code == 1
    assert not (tmp_path / "error").exists()  # No exception could be raised.


def test_a_peer_that_comes_late_is_waited_for(monkeypatch):
    ports = free_ports(2)
    monkeypatch.setenv("TF_CONFIG", configuration(ports, 0))
    made = []
    monkeypatch.setattr("tensorflow.distribute.MultiWorkerMirroredStrategy", lambda: made.append(1) or "strategy")

    def come_late():
        time.sleep(0.5)
        with socket.create_server(("127.0.0.1", ports[1])) as late:
            late.accept()[0].close()

    thread = threading.Thread(target=come_late)
    thread.start()
    assert join_workers(30.0) == "strategy"
    thread.join()
    assert made == [1]
    assert os.environ["TF_CONFIG"]
