"""Guards the readers of files that anybody may have made: each input is read, or refused in one sentence."""

import json
import pathlib
import random
import warnings

import numpy as np
import pytest

import loops
import scaler
from loops.loop.state import folder
from loops.record import read_run
from loops.record.files import metadata_of, replayed_in
from loops.record.log import columns_in, read_columns
from loops.record.skips import health
from loops.record.summary import digest, sentence
from loops.record.trace.action import Frame
from loops.record.trace.stream import _DIGITS, _MARK, _digits, batch_of, opening, schema_of
from loops.record.trace.tensors import Tensor
from loops.run.strategy_text import parse_strategy
from loops.views.report import write_report
from loops.views.watch import LiveRun

INPUTS = [150, pytest.param(100_000, marks=pytest.mark.exhaustive)]
"""How many of each kind; `make test-all` runs the many."""
NASTY = (
    *(None, True, -1, 0, 2**62, 2**63, 10**400, 1e308, float("nan"), "", "x" * 5000, "\0"),
    *("<script>alert(1)</script>", [], {}, [[]], {"a": 1}),
)
WORDS = (
    *("none", "static", "dynamic", "headroom", "warmup", "bounded", "rising_floor", "then", "smooth", "histogram"),
    *(":", "+", ",", "=", "**", "-", "(", "[", "1e999", "9" * 400, "2**-10", "nan", "None", "True", "'", "0x", "1j"),
    *("\0", "growth_interval", "initial_scale", "steps", "100", "1", "0", "1000=8"),
)


def changed(value, chance):
    """A copy of JSON in which some parts are others, are gone or are there twice."""
    if chance.random() < 0.03:
        return chance.choice(NASTY)
    if isinstance(value, dict):
        return {key: changed(one, chance) for key, one in value.items() if chance.random() > 0.02}
    if isinstance(value, list):
        kept = [changed(one, chance) for one in value if chance.random() > 0.02]
        return kept * 2 if chance.random() < 0.02 else kept
    return value


def torn(data, chance):
    """The bytes with some of them changed, taken out or repeated."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0:
                found[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                found[place : place + 8] = chance.choice((-1, 2**31 - 1, 2**62, 1)).to_bytes(8, "little", signed=True)
            case 2:
                del found[place : place + chance.randint(1, 40)]
            case 3:
                found[place:place] = found[place : place + chance.randint(1, 40)]
            case 4:
                found[place : place + 4] = chance.randrange(2**32).to_bytes(4, "little")
    return bytes(found)


def sealed_again(message):
    """A message that was changed, with the checksum that whoever means harm would give it."""
    place = message.find(_MARK) + len(_MARK)
    blank = message[:place] + b"0" * _DIGITS + message[place + _DIGITS :]
    return message[:place] + _digits(blank) + message[place + _DIGITS :]


def check_sentence(error, origin):
    assert "\n" not in str(error), origin
    assert len(str(error)) < 3000, origin


def trace_parts(chance):
    tensors = [Tensor("activations/dense", "float16", False), Tensor("weight_gradients/dense/kernel", "float16", True)]
    schema, first = schema_of(tensors), 1
    yield opening(schema)
    for steps in (3, 1, 9):
        columns = {"loss": np.arange(first, first + steps) / 4, "applied": np.ones(steps, bool)}
        frames = [Frame(first, np.array([0, 0, 1]), np.array([0, 140, 279]), np.array([5, 7, 2**40]))]
        amax = np.arange(2 * steps, dtype=np.float32).reshape(steps, 2)
        yield batch_of(schema, first, columns, [None, "overflow", None][:steps] + [None] * (steps - 3), amax, frames)
        first += steps


@pytest.mark.slow_with("150")
@pytest.mark.parametrize("inputs", INPUTS)
def test_a_trace(inputs, tmp_path):
    path = tmp_path / "trace.arrow"
    for seed in range(inputs):
        chance = random.Random(seed)
        parts = list(trace_parts(chance))
        place = chance.randrange(len(parts))
        parts[place] = torn(parts[place], chance)
        if chance.random() < 0.8:
            parts[place] = sealed_again(parts[place])
        path.write_bytes(b"".join(parts))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", loops.TraceWarning)
            try:
                run = read_run(path)
                sentence(run, digest(run))
            except loops.LoopError as error:
                check_sentence(error, seed)


ROWS = [
    {"step": step, "loss": 0.5, "loss_scale": 1024.0, "grad_norm": 1.0, "attempted": True, "applied": step % 7 > 0,
     "cause": None if step % 7 else "overflow"}
    for step in range(1, 16)
]  # fmt: skip


@pytest.mark.parametrize("inputs", INPUTS)
def test_a_log(inputs, tmp_path):
    comma = [",".join(ROWS[0]), *(",".join(str(value) for value in row.values()) for row in ROWS)]
    for seed in range(inputs):
        chance = random.Random(seed)
        lines = [json.dumps(changed(row, chance)) for row in ROWS]
        if chance.random() < 0.5:
            lines = torn("\n".join(lines).encode(), chance).decode(errors="replace").splitlines()
        path = tmp_path / "steps.jsonl"
        path.write_text("\n".join(lines))
        health(read_columns(path))
        LiveRun(tmp_path).look()
        columns_in(torn("\n".join(comma).encode(), chance).decode(errors="replace").splitlines(), comma=True)
        try:
            run = read_run(path)
            sentence(run, digest(run))
        except loops.LoopError as error:
            check_sentence(error, seed)


FACTS = {
    "format": 2,
    "versions": {"tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"},
    "identity": {"replicas": 1, "batches": "(1, 2)", "optimizer": {"class": "Adam"}, "run": {"task": "digits"}},
    "settings": {"batches": [64]},
    "counters": {"data": 4, "attempted": 4, "applied": 3, "skipped": 1},
    "data": {"batches": 4, "problem": None, "caveats": ["a sentence"]},
    "variables": {"model": [["dense/kernel", "float32", [4, 2]], ["dense/bias", "float32", [2]]]},
    "trainable": {"model": "11"},
    "held": [],
    "actions": {"JsonLines": {"step": 4, "line": 4}},
    "action_keys": {"JsonLines": ["/tmp/steps.jsonl", "../steps.jsonl"]},
    "random": {"python": [3, [1, 2], None], "numpy": ["MT19937", [1], 1, 0, 0.0]},
}


@pytest.mark.parametrize("inputs", INPUTS)
def test_facts_of_a_checkpoint_and_a_summary(inputs, tmp_path, monkeypatch):
    place = tmp_path / "checkpoints"
    place.mkdir()
    (place / "ckpt-4.index").touch()
    text = ""
    # The bytes of a checkpoint are TensorFlow's.
    monkeypatch.setattr("loops.loop.state.folder.tf.train.load_checkpoint", lambda path: _Reader(text))
    replay = {"strategies": [{"strategy": "dynamic", "skips": 1, "final_scale": 8.0}]}
    for seed in range(inputs):
        chance = random.Random(seed)
        text = json.dumps(changed(FACTS, chance))
        if chance.random() < 0.3:
            text = torn(text.encode(), chance).decode(errors="replace")
        try:
            folder.parse(text)
        except ValueError as error:
            check_sentence(error, seed)
        (tmp_path / "summary.json").write_text(json.dumps(changed({"task": "digits", **FACTS}, chance)))
        (tmp_path / "replay.json").write_text(json.dumps(changed(replay, chance)))
        metadata_of(tmp_path)
        replayed_in(tmp_path, [])


class _Reader:
    def __init__(self, text):
        self.get_tensor = lambda key: text
        self.get_variable_to_dtype_map = self.get_variable_to_shape_map = dict


@pytest.mark.parametrize("inputs", INPUTS)
def test_a_strategy_as_text(inputs):
    for seed in range(inputs):
        chance = random.Random(seed)
        text = "".join(chance.choices(WORDS, k=chance.choice((1, 2, 5, 8, 40))))
        try:
            assert isinstance(parse_strategy(text), scaler.Strategy)
        except scaler.InvalidArgument as error:
            check_sentence(error, text)


LARGE = {**ROWS[-1], "step": len(ROWS) + 1, "loss_scale": 1e308}


@pytest.mark.parametrize("inputs", [6, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_a_report_of_them(inputs, tmp_path):
    for seed in range(inputs):
        chance = random.Random(seed)
        (tmp_path / "steps.jsonl").write_text("\n".join(json.dumps(changed(row, chance)) for row in [*ROWS, LARGE]))
        (tmp_path / "summary.json").write_text(json.dumps(changed({"task": "digits", **FACTS}, chance)))
        (tmp_path / "replay.json").write_text(json.dumps({"strategies": [{"strategy": "x", "skips": 10**400}]}))
        try:
            write_report([tmp_path], tmp_path / "report.html")
        except loops.LoopError as error:
            check_sentence(error, seed)
        assert "<script>alert" not in pathlib.Path(tmp_path / "report.html").read_text()
