"""Guards that a run with retry which is killed twice ends as one that is not, whatever scale both began with.

Real processes, really killed. Compared are the bits of weights, statistics, masters and slots; of runs that began with
one scale also the scale. In float32 a run from 2^40 has the bits of one from 2^10. In float16, where a low scale
flushes gradients to zero, it has those of a run from the highest scale at which the first step does not overflow: see
docs/concepts/skips.md.
"""

import json
import signal

import pytest
from processes import start, wait_for
from retried_cases import EVERY, STEPS, train_with_retry

FAR_TOO_HIGH = 2.0**40
LOW = {"float32": 2.0**10}
SOUND = {("digits", 1): 2.0**16, ("digits", 2): 2.0**16, ("text", 1): 2.0**16, ("text", 2): 2.0**17}
"""By the task and the replicas, of which each of two has half of the loss."""
KILLS = (8, 17)
"""Each is some steps after a checkpoint, so that these are taken again."""


def ended(place, *arguments):
    """What the run comes to from where it is."""
    place.mkdir(exist_ok=True)
    process = start(train_with_retry, place, *arguments)
    process.join(600)
    assert process.exitcode == 0
    return json.loads((place / "end.json").read_text())


def killed(place, step, *arguments):
    """Has the run go on to a step, and kills it there."""
    place.mkdir(exist_ok=True)
    process = start(train_with_retry, place, *arguments, step)
    assert wait_for(lambda: (place / f"at {step}").exists(), seconds=600, process=process, pause=0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (place / "end.json").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize(("name", "replicas"), SOUND)
def test_two_kills_and_a_far_too_high_scale_change_no_bit(name, replicas, policy, tmp_path):
    assert all(step % EVERY for step in KILLS)
    run = name, replicas, policy
    sound = ended(tmp_path / "sound", *run, LOW.get(policy, SOUND[name, replicas]))
    whole = ended(tmp_path / "whole", *run, FAR_TOO_HIGH)
    for step in KILLS:
        killed(tmp_path / "killed", step, *run, FAR_TOO_HIGH)
    last = ended(tmp_path / "killed", *run, FAR_TOO_HIGH)
    assert last["bits"] == whole["bits"] == sound["bits"]
    assert last["scale"] == whole["scale"]
    assert (whole["attempted"], whole["applied"]) == (last["attempted"], last["applied"]) == (STEPS, STEPS)
    # 2^40 is too high for float16 alone, where a later step may need a retry from any scale.
    assert (whole["retries"] > sound["retries"]) == (policy == "mixed_float16")
