"""Guards that each preset's scale is the real package's after every step, wherever that package is installed.

`make conformance` installs those that the package index has, into an environment of their own.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import peers
import pytest
import tensorflow as tf
import words
from rigs import scales_of

from scaler import presets
from scaler.outcome.stuck import Reading

STEPS = 10_000
# Words of 200 steps: long enough for a dozen growths, short enough for many sets of arguments. Some leave the range, or
# raise, before their end.
LENGTH, JOBS = 200, 75
# The peers, and what is varied: numbers of few kinds only where a peer compiles itself for each of them anew.
VARIED = {
    name: varied for name, (varied, _) in words.CASES.items() if name in peers.PEERS.keys() - {"optax_apply_if_finite"}
}
VARIED |= {"fairscale": "initial_scale growth_interval", "keras": "", "tf_keras": ""}
FEW = {
    "chainer": [{"interval": n} for n in (1, 3, 10, 1000)],
    "keras": [{"initial_scale": scale, "growth_interval": n} for scale, n in ((2.0**15, 1), (3.3, 3), (0.01, 7))],
    "mindspore": [{"initial_scale": 2.0**24}, {"initial_scale": 1234.567}],
    "tf_keras": [
        {"initial_scale": scale, "growth_interval": n, "growth_factor": factor}
        for scale, n, factor in ((2.0**15, 1, 2.0), (3.3, 3, 4.0), (0.3, 7, 1.7))
    ],
}


def need(name):
    """Skips a test of a peer that is not installed."""
    for distribution in peers.PEERS[name][1]:
        if peers.installed(distribution) is None:
            pytest.skip(f"{distribution} is not installed: make conformance")


def theirs(name, jobs):
    """The peer's scales; Keras, which is here anyway, in this process."""
    if name == "keras":
        return peers.answers(name, jobs)
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(peers.__file__)), name],
        input=json.dumps(jobs),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    print(f"{name} {answer['version']}")
    return answer["scales"]


def jobs_of(name, rng):
    """For each variant, the words and the arguments of each."""
    few = FEW.get(name, words.CASES[name][1])
    count = JOBS * (2 if name.startswith("deepspeed") else 1) // len(few)
    for fixed in few:
        finite = words.random_words(rng, LENGTH, count)
        varied = words.arguments(rng, VARIED[name].split(), name != "apex", count)
        yield fixed, varied, finite


@pytest.mark.slow_with("keras")
@pytest.mark.parametrize("name", VARIED)
def test_scales_are_those_of_the_real_package(name):
    need(name)
    rng = np.random.default_rng(len(name))
    cases = list(jobs_of(name, rng))
    jobs, ours = [], []
    for fixed, varied, finite in cases:
        got = words.scales(name, finite, fixed, varied)
        for column, word in enumerate(finite.T):
            jobs.append((fixed | {key: values[column] for key, values in varied.items()}, word.tolist()))
            ours.append(got[:, column])
    compared = 0
    for (arguments, _), got, want in zip(jobs, ours, theirs(name, jobs), strict=True):
        inside = [2.0**-126 <= scale <= 2.0**126 for scale in want]
        count = inside.index(False) if False in inside else len(want)
        with np.errstate(over="ignore"):
            wanted = np.array(want[:count]).astype(np.float32)
        np.testing.assert_array_equal(got[:count], wanted, err_msg=str(arguments))
        compared += count
    print(f"{name}: {compared} steps compared")
    assert compared >= STEPS


def test_the_policy_raises_where_optax_gives_up():
    need("optax_apply_if_finite")
    rng = np.random.default_rng(0)
    jobs = [
        ({"max_consecutive_errors": int(rng.integers(1, 6))}, word.tolist())
        for word in words.random_words(rng, LENGTH, JOBS).T
    ]
    for (arguments, word), let_through in zip(jobs, theirs("optax_apply_if_finite", jobs), strict=True):
        policy, row, raised = presets.optax_apply_if_finite_stuck(**arguments), 0, []
        for step, finite in enumerate(word):
            row = 0 if finite else row + 1
            raised.append(policy.problem([Reading(step, step, row, 1.0)], 1.0, 1.0) is not None)
        np.testing.assert_array_equal(raised, np.array(let_through, bool), err_msg=str(arguments))


def test_tf_keras_is_also_the_dynamic_loss_scale_of_tensorflow_1():
    initial_scale, growth_interval, multiplier = 3.3, 3, 1.7
    finite = words.random_words(np.random.default_rng(0), 50, 2)

    def theirs_of(word):
        scale = tf.compat.v1.mixed_precision.DynamicLossScale(initial_scale, growth_interval, multiplier)
        scales = []
        for letter in word:
            scale.update([tf.constant(1.0 if letter else np.inf)])
            scales.append(scale().numpy())
        return np.array(scales)

    strategy = presets.tf_keras(initial_scale, growth_factor=multiplier, growth_interval=growth_interval)
    got = scales_of(strategy, tf.constant(finite)).numpy()
    for column, word in enumerate(finite.T):
        np.testing.assert_array_equal(got[:, column], theirs_of(word))
