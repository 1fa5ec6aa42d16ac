"""Guards the values by which runs are told apart: different ones differ as JSON, and none holds an address."""

import collections
import dataclasses
import datetime
import enum
import functools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import loops
import scaler
from loops.loop.state.described import NoText, as_plain, exact, text_of


class Split(enum.Enum):
    TRAIN = 1
    TEST = 2


class Part(enum.Flag):
    HEAD = 1
    BODY = 2


@dataclasses.dataclass
class Options:
    rate: float
    path: pathlib.Path = pathlib.Path("data")


class Plain:
    """Without a text of its own."""

    def __init__(self, value):
        self.value = value


Point = collections.namedtuple("Point", "x y")

PAIRS = {
    "path": (pathlib.Path("v1"), pathlib.Path("v2")),
    "date": (datetime.date(2024, 1, 1), datetime.date(2025, 1, 1)),
    "time": (datetime.datetime(2024, 1, 1, 1), datetime.datetime(2024, 1, 1, 2)),
    "duration": (datetime.timedelta(1), datetime.timedelta(2)),
    "enum": (Split.TRAIN, Split.TEST),
    "flag": (Part.HEAD | Part.BODY, Part.HEAD),
    "dataclass": (Options(1.0), Options(2.0)),
    "inside of a dataclass": (Options(1.0, pathlib.Path("a")), Options(1.0, pathlib.Path("b"))),
    "set": ({"a", "b"}, {"a", "c"}),
    "frozen set": (frozenset([1, "a"]), frozenset([1, "b"])),
    "tuple": (Point(1, 2), Point(1, 3)),
    "array": (np.array([1, 2]), np.array([1, 3])),
    "shape": (np.zeros([2, 3]), np.zeros([3, 2])),
    "dtype": (np.zeros([2], np.float32), np.zeros([2], np.int32)),
    "objects": (np.array([Split.TRAIN, "a"], object), np.array([Split.TEST, "a"], object)),
    "scalar": (np.int64(1), np.int64(2)),
    "tensor": (tf.constant(1), tf.constant(2)),
    "strings": (tf.constant(["a", "b"]), tf.constant(["a", "c"])),
    "ragged": (tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[1, 2], [3]])),
    "variable": (tf.Variable([1.0, 2.0]), tf.Variable([1.0, 3.0])),
    "weight": (keras.Variable([1.0, 2.0]), keras.Variable([1.0, 3.0])),
    "bytes": (b"one", b"two"),
    "complex": (1 + 2j, 1 + 3j),
    "range": (range(3), range(4)),
    "keys": ({("a", 1): 1}, {("a", 2): 1}),
    "schedule": (keras.optimizers.schedules.CosineDecay(0.1, 10), keras.optimizers.schedules.CosineDecay(0.1, 20)),
    "strategy": (scaler.Dynamic(2.0), scaler.Dynamic(4.0)),
    "plain object": (Plain(pathlib.Path("a")), Plain(pathlib.Path("b"))),
    "class": (Plain, Options),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_told_apart(name):
    one, other = (json.dumps(exact({"value": value})) for value in PAIRS[name])
    assert one != other
    assert "0x" not in one


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_set_has_one_text_in_every_process():
    program = "from loops.loop.state.described import exact; print(exact({'one', 'two', 'three', ('a', 1)}))"

    def text(seed):
        known = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=known).stdout

    assert text("1") == text("2") == f"{exact({'one', 'two', 'three', ('a', 1)})}\n"


def test_numbers_and_text_are_as_json_has_them():
    for value in (None, True, 3, 0.5, "text", [1, [2]], {"a": {"b": 1}}):
        assert exact(value) == value
    assert exact({1: (2, 3), None: np.float32(0.5), False: 1.5}) == {"1": [2, 3], "null": 0.5, "false": 1.5}


HOLDS_ITSELF = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
WITHOUT = {
    "function": lambda x: x,
    "partial": functools.partial(lambda x: x, 1),
    "object": object(),
    "iterator": iter([1]),
    "model": keras.Sequential([keras.layers.Input([1])]),
    "dataset": tf.data.Dataset.range(3),
    "scaler": scaler.LossScaler(),
    "inside": {"a": [Plain(object())]},
    "two names of one text": {1: "a", "1": "b"},
    "itself": HOLDS_ITSELF,
    "keras tensor": keras.Input([1]),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_no_text_tells_apart_is_refused_at_once(name, tmp_path):
    with pytest.raises(NoText):
        exact(WITHOUT[name])
    with pytest.raises(scaler.InvalidArgument, match=r"Checkpoint\(run=...\): it holds .* Give its name"):
        loops.Checkpoint(tmp_path, every=1, run={"value": WITHOUT[name]})
    assert "0x" not in json.dumps(as_plain(WITHOUT[name]))


def test_an_object_is_described_without_its_address():
    assert text_of(scaler.Static(8.0)) == repr(scaler.Static(8.0))
    assert text_of(Plain(scaler.Static(8.0))) == {"class": "Plain", "value": exact(scaler.Static(8.0))}
    assert text_of(Plain(print)) == {"class": "Plain", "value": repr(print)}
