"""Guards the memory of whoever reads a file that says it is larger than it is."""

import base64
import json
import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

import loops
import scaler
from loops.loop import kept_batches
from loops.loop.state import folder
from loops.record.log import read_columns
from loops.record.trace import action, stream
from loops.record.trace.action import unpack
from loops.record.trace.file import contents
from loops.record.trace.stream import _DIGITS, _MARK, _digits, batch_of, opening, schema_of, unpacked_size
from loops.run.strategy_text import parse_strategy


def packed(rows=2000):
    schema = schema_of([])
    batch = batch_of(schema, 1, {"loss": np.zeros(rows)}, [None] * rows, None, [])
    return opening(schema), batch


def sealed_again(message):
    place = message.find(_MARK) + len(_MARK)
    blank = message[:place] + b"0" * _DIGITS + message[place + _DIGITS :]
    return message[:place] + _digits(blank) + message[place + _DIGITS :]


def test_the_memory_of_a_batch_is_known_before_it_is_taken():
    first, batch = packed()
    message = next(pa.ipc.MessageReader.open_stream(pa.py_buffer(batch)))
    taken = pa.ipc.read_record_batch(message, contents(first).schema).nbytes
    assert taken <= unpacked_size(message) <= taken + 1000
    assert taken > 5 * len(batch)


def test_a_buffer_that_says_it_is_huge_is_not_unpacked():
    """The rows' numbers are packed: before them stands how many bytes they are."""
    first, batch = packed()
    size = struct.pack("<q", 8 * 2000)
    assert size in batch
    said = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    for huge in (2**40, 2**62):
        found = contents(first + sealed_again(batch.replace(size, struct.pack("<q", huge))))
        assert (len(found.batches), found.whole) == (0, False)
    assert pool.max_memory() is None or pool.max_memory() < said + 2**30


def test_batches_that_are_packed_too_well_are_not_unpacked(tmp_path, monkeypatch):
    first, batch = packed()
    monkeypatch.setattr(stream, "MOST", 0)
    monkeypatch.setattr(stream, "_RATIO", 1)
    (tmp_path / "trace.arrow").write_bytes(first + batch)
    with pytest.warns(loops.TraceWarning, match="without a single step"):
        loops.observe.read(tmp_path / "trace.arrow")


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(zlib.compress(bytes(2**20 + 32), 9)).decode(),
        base64.b64encode(zlib.compress(bytes(64))[:-6]).decode(),
        base64.b64encode(zlib.compress(bytes(7))).decode(),
        "no base64",
        7,
    ],
    ids=["too large", "cut off", "no table", "no base64", "a number"],
)
def test_histograms_of_a_checkpoint_that_cannot_be_read_are_one_sentence(text, monkeypatch):
    monkeypatch.setattr(action, "MOST", 2**20)
    with pytest.raises(loops.LoopError, match="histograms that a checkpoint holds"):
        unpack(text)


def test_a_checkpoint_whose_index_tells_of_more_than_its_data_is_damaged(tmp_path):
    path = tf.train.Checkpoint(value=tf.Variable(tf.zeros([1000]))).write(str(tmp_path / "ckpt-1"))
    data = next(tmp_path.glob("ckpt-1.data-*"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(folder.Damaged, match="its index tells of 4001 bytes, and its data has 100"):
        folder.read_facts(path)


def test_short_texts_are_no_more_than_they_are(tmp_path):
    words = tf.Variable(["a"] * 1000)
    path = tf.train.Checkpoint(value=words).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(folder.Damaged, match="facts"):
        folder.read_facts(path)


def test_one_long_cause_does_not_widen_the_column_of_all(tmp_path):
    rows = [
        {"step": step, "applied": False, "cause": "x" * 10**6 if step == 1 else "overflow"} for step in range(1, 99)
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_columns(tmp_path / "steps.jsonl").cause.nbytes < 10**5


@pytest.mark.parametrize(
    "text", ["static:" + "-" * 10**5 + "1", "static:" + "(" * 10**5, "warmup:1+" * 10**4 + "dynamic"]
)
def test_a_strategy_that_lies_too_deep_is_one_sentence(text):
    with pytest.raises(scaler.InvalidArgument, match="expected at most 1000") as caught:
        parse_strategy(text)
    assert len(str(caught.value)) < 200


def test_a_link_to_a_folder_among_leftovers_is_removed_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / "ckpt-5_temp").symlink_to(tmp_path / "precious")
    folder.sweep_leftovers(tmp_path / "saves")
    assert (tmp_path / "precious" / "file").exists()
    assert not (tmp_path / "saves" / "ckpt-5_temp").is_symlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda fields, part: (fields + ["1", "2"], part),
        lambda fields, part: (["9" * 5000, *fields[1:]], part),
        lambda fields, part: ([fields[0], "\xe9", *fields[2:]], part),
        lambda fields, part: ([*fields[:3], str(kept_batches._checksum(b"x").numpy().decode())], b"x"),
    ],
    ids=["more tensors", "a number of 5000 digits", "not ASCII", "no tensor"],
)
def test_a_kept_batch_that_was_made_to_do_harm_is_none(change, tmp_path):
    spec = tf.TensorSpec([2], tf.float32)
    kept_batches.write(tmp_path, tf.constant([1.0, 2.0]), tf.constant(1, tf.int64), last=3, element_spec=spec)
    path = next(tmp_path.iterdir())
    line, _, part = path.read_bytes().partition(b"\n")
    fields, part = change(line.decode().split()[1:], part)
    fields[2] = str(len(part)) if len(fields) == 4 else fields[2]
    text = " ".join(fields).encode()
    path.write_bytes(kept_batches._checksum(text).numpy() + b" " + text + b"\n" + part)
    found = kept_batches.KeptBatches(tmp_path, spec)
    assert found.get(1) is None
    kept_batches.sweep(tmp_path, 1)


def test_a_text_that_says_it_lies_outside_of_the_message_is_not_read():
    """The texts of the column `kind` of three rows: where each begins and ends, of which pyarrow would believe all."""
    schema = schema_of([])
    batch = batch_of(schema, 1, {"loss": np.zeros(3)}, [None] * 3, None, [])
    ends = struct.pack("<4i", 0, 4, 8, 12)
    assert batch.count(ends) == 1
    for wrong in ((0, 4, 8, 2**30), (0, 4, -8, 12), (2**30, 2**30, 2**30, 2**30)):
        found = contents(opening(schema) + sealed_again(batch.replace(ends, struct.pack("<4i", *wrong))))
        assert (len(found.batches), found.whole) == (0, False)


def test_a_cause_that_a_terminal_would_obey_is_unknown(tmp_path):
    rows = [
        {"step": 1, "applied": False, "cause": "\x1b]0;title\x07"},
        {"step": 2, "applied": False, "cause": "overflow"},
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_columns(tmp_path / "steps.jsonl").cause.tolist() == ["", "overflow"]
