"""What TensorFlow's profiler saw of a step: copies between a GPU and its host, and waits of the host for the GPU."""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

_STEPS = 10
_TO_HOST, _TO_DEVICE = "MemcpyD2H", "MemcpyH2D"
_WAIT = re.compile(r"cu(da)?(Stream|Event|Ctx|Device)Synchronize")


class Seen(NamedTuple):
    """What happened in one step, on average.

    Attributes:
        to_host: Copies from the GPU to its host.
        to_device: Copies from the host to the GPU.
        waits: Calls of the driver that end when the GPU has done its work.
        largest: Bytes of the largest of these copies.
        on_gpu: All that the GPU did, kernels among it.
    """

    to_host: float
    to_device: float
    waits: float
    largest: int
    on_gpu: float


def profiled(step: Callable[[], tf.Tensor]) -> Seen:
    """Ten steps, warm, of which only the last one's result is read, and that after the profile."""
    for _ in range(2):
        step().numpy()
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=0, python_tracer_level=0)
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options):
            for _ in range(_STEPS):
                result = step()
        result.numpy()
        seen = counted([path.read_bytes() for path in pathlib.Path(folder).rglob("*.xplane.pb")], _STEPS)
    if tf.config.list_physical_devices("GPU") and not seen.on_gpu:
        raise RuntimeError(
            "the profiler saw nothing of the GPU: CUPTI is missing, or the driver lets root alone use it"
        )
    return seen


def counted(profiles: list[bytes], steps: int) -> Seen:
    """What is in profiles, which are serialised `XSpace`s, for one of their steps."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    names, largest, on_gpu = [], 0, 0
    for plane in (plane for profile in profiles for plane in xplane_pb2.XSpace.FromString(profile).planes):
        is_gpu = plane.name.startswith("/device:GPU")
        for event in (event for line in plane.lines for event in line.events):
            name = plane.event_metadata[event.metadata_id].name
            on_gpu += is_gpu
            # The call that starts a copy is an event, too, of the host.
            if (name in (_TO_HOST, _TO_DEVICE)) if is_gpu else _WAIT.match(name):
                names.append(name)
                largest = max(largest, _size(plane, event))
    copies = names.count(_TO_HOST), names.count(_TO_DEVICE)
    return Seen(copies[0] / steps, copies[1] / steps, (len(names) - sum(copies)) / steps, largest, on_gpu / steps)


def _size(plane, event) -> int:
    """The bytes of a copy: the profile has them in a text, "kind_src:device kind_dst:pinned size:4 dest:0 async:1"."""
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "memcpy_details":
            text = stat.str_value or plane.stat_metadata[stat.ref_value].name
            return int(re.search(r"\bsize:(\d+)", text)[1])
    return 0
