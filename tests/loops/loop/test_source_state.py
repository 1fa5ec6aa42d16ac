"""Guards the position of a source as JSON: it comes back as it was, and nothing is run or imported for it."""

import collections
import contextlib
import json
import shutil
import sys
import types

import numpy as np
import pytest
from source_cases import Run

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


SHAPES = {"seen": [[[2, 3]]], "common": None}


@pytest.mark.parametrize("name", VALUES)
def test_a_state_comes_back_as_it_was(name):
    found = decode(json.loads(json.dumps(encode(VALUES[name]))))
    assert (type(found), repr(found)) == (type(VALUES[name]), repr(VALUES[name]))


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


grain = pytest.importorskip("grain")
ROWS = np.arange(40, dtype=np.float32)
BY_ITSELF = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""Without the threads of Grain, which read 500 batches ahead."""


class Doubled(grain.transforms.Map):
    def map(self, element):
        return 2 * element


class Noisy(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element + rng.normal(size=4).astype(np.float32)


def loader(seed=1):
    sampler = grain.samplers.IndexSampler(len(ROWS), shuffle=True, seed=seed, num_epochs=None)
    operations = [Doubled(), grain.transforms.Batch(4, drop_remainder=True)]
    return grain.DataLoader(data_source=ROWS, sampler=sampler, operations=operations, read_options=BY_ITSELF)


def iterated():
    mapped = grain.MapDataset.source(ROWS).seed(1).shuffle().repeat().map(lambda row: 2 * row).batch(4)
    return mapped.to_iter_dataset(BY_ITSELF).random_map(Noisy())


@pytest.mark.parametrize(("make", "steps_per_call"), [(loader, 1), (iterated, 4)])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, make, steps_per_call):
    """Beyond an epoch of ten batches, with a thread that was ahead."""
    run = Run(make(), steps_per_call=steps_per_call, folder=tmp_path / "run").go(7)
    run.loop.position.check()
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    run.go(25)
    resumed = Run(make(), steps_per_call=steps_per_call, folder=tmp_path / "killed").go(25)
    assert resumed.losses == run.losses[7:]
    assert len(set(run.losses)) == 25


def test_a_loader_with_another_sampler_is_refused(tmp_path):
    """By Grain itself, in whose state the sampler is."""
    Run(loader(), folder=tmp_path).go(3)
    with pytest.raises(loops.CheckpointError, match="DataLoaderIterator cannot go on"):
        Run(loader(seed=2), folder=tmp_path).go(6)


def test_the_end_of_an_epoch_is_the_end_of_the_data():
    run = Run(grain.MapDataset.source(ROWS).batch(4), steps_per_call=8)
    with pytest.raises(loops.OutOfData, match="ended after 10 of 12 steps"):
        run.go(12)
    assert run.visits == [8, 10]
