"""Guards the file of a trace: what is whole is read back, and what is torn or damaged is never taken for whole."""

import itertools

import numpy as np
import pyarrow
import pyarrow.ipc as pa
import pytest

import loops
from loops.record.trace.action import Frame
from loops.record.trace.file import TraceFile, contents
from loops.record.trace.stream import KEY, batch_of, opening, schema_of
from loops.record.trace.tensors import Tensor

TENSORS = [Tensor("activations/dense", "float16", False), Tensor("weight_gradients/dense/kernel", "float16", True)]
BATCHES = [3, 1, 9]
"""Steps in each; only the last is large enough to be compressed."""


def frame(step):
    return Frame(step, np.array([0, 0, 1]), np.array([0, 140, 279]), np.array([5, step, 2**40]))


def messages():
    """A schema and batches, of which the last but one ends with the histograms of a step of the first."""
    schema, first = schema_of(TENSORS), 1
    yield opening(schema)
    for number, steps in enumerate(BATCHES):
        columns = {"loss": np.arange(first, first + steps) / 4, "applied": np.ones(steps, bool)}
        amax = np.arange(2 * steps, dtype=np.float32).reshape(steps, 2)
        frames = {0: [], 1: [frame(2), frame(4)], 2: [frame(8)]}[number]
        yield batch_of(schema, first, columns, [None] * steps, amax, frames)
        first += steps


@pytest.fixture(scope="module")
def parts():
    return list(messages())


@pytest.fixture
def path(tmp_path, parts):
    (tmp_path / "trace.arrow").write_bytes(b"".join(parts))
    return tmp_path / "trace.arrow"


def test_any_reader_of_arrow_reads_it(path):
    """The schema, then a record batch for each visit, and no end marker."""
    with pa.open_stream(path) as reader:
        table = reader.read_all()
        assert reader.schema.metadata[b"halfstep.trace"] == b"1"
    assert table["kind"].to_pylist() == ["step"] * 4 + ["histograms"] * 2 + ["step"] * 9 + ["histograms"]
    assert table["step"].to_pylist() == [1, 2, 3, 4, 2, 4, *range(5, 14), 8]
    assert table["loss"].to_pylist()[:6] == [0.25, 0.5, 0.75, 1.0, None, None]


def test_tables_are_those_that_were_written(path):
    found = loops.observe.read(path)
    assert found.steps["step"].to_pylist() == list(range(1, 14))
    assert found.steps["loss"].to_pylist() == [step / 4 for step in range(1, 14)]
    assert found.steps["grad_norm"].to_pylist() == [None] * 13
    assert found.steps["amax/weight_gradients/dense/kernel"].to_pylist() == [1, 3, 5, 1, *range(1, 19, 2)]
    names = [tensor.name for tensor in TENSORS]
    rows = [row for step in (2, 4, 8) for row in ((step, 0, 0, 5), (step, 0, 140, step), (step, 1, 279, 2**40))]
    assert found.histograms.to_pylist() == [
        {"step": step, "tensor": names[tensor], "bin": place, "count": count} for step, tensor, place, count in rows
    ]
    assert found.tensors["format"].to_pylist() == ["float16", "float16"]
    assert found.tensors["carries_scale"].to_pylist() == [False, True]


@pytest.mark.slow
def test_cut_anywhere_exactly_the_whole_batches_are_there(parts):
    data, ends = b"".join(parts), list(itertools.accumulate(map(len, parts)))
    # Each seventh byte: each place of a word of eight.
    for cut in {*range(0, len(data), 7), *(cut for end in ends for cut in range(end - 8, end + 1))}:
        found = contents(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert (len(found.batches), found.schema is not None) == (max(whole - 1, 0), whole > 0)
        assert found.whole == (cut in [0, *ends])


@pytest.mark.exhaustive
def test_every_flipped_byte_is_found(parts):
    """Batches before it are read; nothing of its own and none after it."""
    data, ends = b"".join(parts), list(itertools.accumulate(map(len, parts)))
    # 0x20 makes a capital of a letter, which is the same digit.
    for place, flip in itertools.product(range(len(data)), (0x01, 0x20, 0xFF)):
        damaged = bytearray(data)
        damaged[place] ^= flip
        found = contents(bytes(damaged))
        assert found.end == max([end for end in ends if end <= place], default=0), (place, flip)
        assert len(found.batches) == max(sum(end <= place for end in ends) - 1, 0)


@pytest.mark.slow_with("3")
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_reading_says_up_to_which_step_it_went(path, parts, kept):
    path.write_bytes(path.read_bytes()[: sum(map(len, parts[: kept + 1])) - 1])
    steps = sum(BATCHES[: kept - 1])
    where = f"up to step {steps}" if steps else "without a single step"
    with pytest.warns(loops.TraceWarning, match=f"incomplete or damaged at byte .*: read {where}"):
        found = loops.observe.read(path)
    assert found.steps["step"].to_pylist() == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "it is empty"), (b"step,loss\n1,2\n", "complete Arrow schema"), (None, "No such file")]
)
def test_what_is_no_trace_is_one_sentence(tmp_path, data, said):
    if data is not None:
        (tmp_path / "trace.arrow").write_bytes(data)
    with pytest.raises(loops.LoopError, match=said):
        loops.observe.read(tmp_path / "trace.arrow")


def test_another_version_is_refused(tmp_path):
    schema = schema_of(TENSORS)
    other = schema.with_metadata({**schema.metadata, b"halfstep.trace": b"2", KEY.encode(): b"crc32=00000000"})
    (tmp_path / "trace.arrow").write_bytes(opening(other))
    with pytest.raises(loops.LoopError, match="its format is 2"):
        loops.observe.read(tmp_path / "trace.arrow")


def test_a_message_that_does_not_fit_leaves_nothing(tmp_path, parts, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if self.file.tell() > file.end + 500:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:600])

    file = TraceFile(tmp_path / "trace.arrow")
    file.open()
    whole = parts[:2]
    for part in whole:
        file.add(part)
    with monkeypatch.context() as full:
        full.setattr(file._file, "_file", Full(file._file._file))
        with pytest.raises(OSError, match="No space"):
            file.add(parts[2])
    assert (tmp_path / "trace.arrow").read_bytes() == b"".join(whole)
    assert file.end == len(b"".join(whole))
    file.add(parts[2])
    file.close()
    assert (tmp_path / "trace.arrow").read_bytes() == b"".join(parts[:3])


@pytest.mark.parametrize(("kept", "said"), [(2, "is damaged after"), (None, "is gone")])
def test_a_file_that_lost_what_a_checkpoint_knows_goes_on_with_a_warning(path, parts, kept, said):
    end = len(b"".join(parts))
    before = b"".join(parts)[:-3]
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(before)
    file = TraceFile(path)
    with pytest.warns(loops.ResumeWarning, match=said):
        file.keep(end)
    file.open()
    file.add(parts[0] if kept is None else parts[3])
    file.close()
    assert path.read_bytes() == (parts[0] if kept is None else b"".join(parts))
    assert kept is None or path.with_name("trace.arrow.damaged").read_bytes() == before


def test_what_a_checkpoint_does_not_know_is_cut_off(path, parts):
    file = TraceFile(path)
    file.keep(len(parts[0] + parts[1]))
    assert path.read_bytes() == parts[0] + parts[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda schema: schema.remove(schema.get_field_index("loss")),
        lambda schema: schema.set(0, schema.field(0).with_name("sort")),
        lambda schema: schema.set(1, schema.field(1).with_type(pyarrow.int8())),
        lambda schema: schema.with_metadata({**schema.metadata, b"tensors": b"[" * 10**5}),
        lambda schema: schema.with_metadata(
            {**schema.metadata, b"tensors": b'[{"name": 7, "format": [], "carries_scale": 1}]'}
        ),
        lambda schema: schema.with_metadata({k: v for k, v in schema.metadata.items() if k != b"tensors"}),
    ],
    ids=["a column less", "another name", "another type", "too deep", "no texts", "no tensors"],
)
def test_a_schema_of_other_columns_or_tensors_is_one_sentence(tmp_path, change):
    (tmp_path / "trace.arrow").write_bytes(opening(change(schema_of(TENSORS))))
    with pytest.raises(loops.LoopError, match="its columns, or the list of its tensors, are not those of a trace"):
        loops.observe.read(tmp_path / "trace.arrow")
