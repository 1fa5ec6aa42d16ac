"""Guards the position of a source as JSON: it comes back as it was, and nothing is run or imported for it."""

import collections
import contextlib
import json
import sys
import types

import numpy as np
import pytest

import loops
from loops.loop.source import decode, encode
from loops.loop.state.folder import _SOURCE, _fits
from loops.support.json_values import read_object

VALUES = {
    "plain": {"a": [1, 2.5, True, None, "text"], "b": {}},
    "bytes": b"\x00\xff",
    "tuples": (3, (1, 2, None), [(), 2**200]),
    "keys": {1: "one", (2, 3): "two", "x": 1},
    "a key of ours": {"halfstep": "bytes", "value": "AA=="},
    "a generator's": np.random.default_rng(7).bit_generator.state,
    "an old generator's": np.random.RandomState(7).get_state(),
    "a scalar": np.int64(-3),
    "an array": np.arange(6, dtype=">i2").reshape(2, 3),
    "an empty one": np.zeros((0, 2), bool),
}


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            same(part, other_part)
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other


SHAPES = {"seen": [[[2, 3]]], "common": None}


@pytest.mark.parametrize("name", VALUES)
def test_a_state_comes_back_as_it_was(name):
    same(decode(json.loads(json.dumps(encode(VALUES[name])))), VALUES[name])


@pytest.fixture
def torch(monkeypatch):
    """What a program has that imports PyTorch, as far as a state needs it."""
    module = types.ModuleType("torch")
    module.Tensor = type("Tensor", (), {"__module__": "torch", "numpy": lambda self: self.array})

    def from_numpy(array):
        tensor = module.Tensor()
        tensor.array = array
        return tensor

    module.from_numpy = from_numpy
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_a_tensor_of_pytorch_comes_back_as_one(torch):
    saved = encode({"generator": torch.from_numpy(np.arange(4, dtype=np.uint8))})
    found = decode(json.loads(json.dumps(saved)))["generator"]
    assert isinstance(found, torch.Tensor)
    assert found.array.tolist() == [0, 1, 2, 3]


def test_pytorch_is_not_imported_for_a_state(torch, monkeypatch):
    saved = encode(torch.from_numpy(np.zeros(1)))
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ValueError, match="which this program has not imported"):
        decode(saved)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [{1}]}, r"its state\['a'\]\[0\] is a set"),
        ({"a": len}, r"its state\['a'\] is a builtin_function_or_method"),
        (np.array([object()]), "its state is a ndarray"),
        ({frozenset(): 1}, "its a key of state is a frozenset"),
        (collections.namedtuple("Place", "x")(1), "its state is a Place"),
    ],
)
def test_what_is_none_of_these_is_refused(state, said):
    with pytest.raises(loops.CheckpointError, match=f"{said}. Expected numbers, text, bytes"):
        encode(state)


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: (value,), lambda value: {1: value}])
def test_a_state_is_as_deep_as_a_checkpoint_can_be_read(wrap):
    states = [1]
    for _ in range(100):
        states.append(wrap(states[-1]))
    found = []
    with contextlib.suppress(loops.CheckpointError):
        found.extend(map(encode, states))
    deepest = found[-1]
    with pytest.raises(loops.CheckpointError, match="nested more than 80 levels deep"):
        encode(states[len(found)])
    facts = {"data": {"source": {"state": deepest}}}
    assert read_object(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    "damaged",
    [
        {"halfstep": "class", "value": "os.system"},
        {"halfstep": ["bytes"]},
        {"halfstep": "bytes", "value": "~"},
        {"halfstep": "bytes", "value": 3},
        {"halfstep": "tuple", "value": 3},
        {"halfstep": "dict", "value": [[1]]},
        {"halfstep": "dict", "value": [[[], 1]]},
        {"halfstep": "array", "value": ["|O", [1], "AAAAAAAAAAA="]},
        {"halfstep": "array", "value": ["<i8", [2], "AAAAAAAAAAA="]},
        {"halfstep": "array", "value": ["no such", [2], ""]},
        {"halfstep": "array", "value": ["<i8", [10**30], ""]},
        {"halfstep": "array", "value": []},
    ],
)
def test_a_damaged_state_is_a_value_error(damaged):
    with pytest.raises(ValueError):  # noqa: PT011 - of any text
        decode({"a": [damaged]})


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({"name": "a", "length": 3, "state": None, "shapes": SHAPES}, True),
        ({"name": "a", "length": 3, "state": None}, False),
        ({"name": "a", "length": 3, "state": None, "shapes": {"seen": [[2]], "common": None}}, False),
        ({"name": "a", "length": 3, "state": None, "shapes": {"seen": [], "common": [["2"]]}}, False),
        ({"name": "a", "length": 3, "state": None, "shapes": {"seen": [], "common": [[2, None], None]}}, True),
        ({"name": "a", "length": 3, "state": None, "shapes": {"seen": [[[2], [3]]], "common": [[2]]}}, False),
        ({"name": "a", "length": True, "state": None, "shapes": SHAPES}, False),
        ({"name": 1, "length": None, "state": None, "shapes": SHAPES}, False),
        ({"name": "a", "length": None}, False),
        ([], False),
    ],
)
def test_the_facts_of_a_source_have_a_form(value, good):
    assert _fits(value, _SOURCE) is good
