"""Drives other systems' real scalers through words: the scale after each step, as their own code computes it.

    python tests/conformance/peers.py PEER < jobs.json

A job is a list of arguments, in this package's names, and a word; the answer is the version of the package and one list
of scales for each job, which ends early where the original raises. Each peer runs in a process of its own: several of
them in one process do not get along.

Where a package cannot be imported on this machine, or its scaler insists on a GPU or a process group, the class is
taken from the package's own file and its own code run with stand-ins for what it does not need.
"""

import ast
import contextlib
import functools
import importlib.metadata
import io
import json
import math
import os
import pathlib
import sys
import types

INF = float("inf")


# Packages that must not be imported, as `pip install --target` puts them there: another version of one that is
# installed, or one for older Pythons.
ASIDE = pathlib.Path(sys.prefix, "aside")


def installed(distribution):
    """An installed package's distribution, or None; "deepspeed aside" is the one that lies aside."""
    name, _, aside = distribution.partition(" ")
    path = [str(ASIDE)] if aside else sys.path
    return next(iter(importlib.metadata.distributions(name=name, path=path)), None)


def taken(distribution, path, name, scope):
    """A class from a file of an installed package, without its module's imports and what else is not in the scope."""
    source = pathlib.Path(installed(distribution).locate_file(path)).read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    node.bases = [base for base in node.bases if isinstance(base, ast.Name) and base.id in scope]
    node.decorator_list = []
    exec(compile(ast.Module([node], []), path, "exec"), scope)
    return scope[name]


class Anything:
    """Takes any call and attribute."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self


def run(word, step, scale, errors=()):
    """The scales after each step, up to the one that raises."""
    scales = []
    for finite in word:
        try:
            step(bool(finite))
        except errors:
            break
        value = scale()
        scales.append(float(getattr(value, "item", lambda value=value: value)()))
    return scales


def pytorch(initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
    import torch

    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(finite):
        scaler.scale(torch.zeros(()))
        weight.grad = torch.tensor([1.0 if finite else INF])
        scaler.step(optimizer)
        scaler.update()

    return lambda word: run(word, step, scaler.get_scale)


def fairscale(initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
    import torch
    from fairscale.optim.grad_scaler import ShardedGradScaler

    # Without a GPU it disables itself, so that the state of an enabled one is given to its rule for the CPU.
    state = types.SimpleNamespace(
        _scale=torch.tensor(initial_scale),
        _growth_factor=growth_factor,
        _backoff_factor=backoff_factor,
        _growth_interval=growth_interval,
        _growth_tracker=0,
    )
    found = {True: torch.tensor(0.0), False: torch.tensor(1.0)}
    return lambda word: run(
        word, lambda finite: ShardedGradScaler._amp_update_scale_cpu_(state, found[finite]), lambda: state._scale
    )


def nemo(initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, hysteresis=1):
    from collections import defaultdict

    import torch

    quiet = types.SimpleNamespace(all_reduce=Anything(), ReduceOp=Anything())
    stand_in = types.SimpleNamespace(distributed=quiet, _amp_update_scale_=torch._amp_update_scale_)
    scope = {
        "torch": stand_in,
        "parallel_state": Anything(),
        "HAVE_AMP_C": False,
        "defaultdict": defaultdict,
        "_refresh_per_optimizer_state": dict,
        "Optional": __import__("typing").Optional,
    }
    kind = taken("nemo_toolkit", "nemo/collections/nlp/parts/nlp_overrides.py", "GradScaler", scope)
    scaler = kind.__new__(kind)
    vars(scaler).update(
        _enabled=True,
        _scale=torch.tensor(initial_scale),
        _growth_tracker=torch.tensor(0, dtype=torch.int32),
        _growth_factor=growth_factor,
        _backoff_factor=backoff_factor,
        _growth_interval=growth_interval,
        hysteresis=hysteresis,
        _hysteresis_tracker=hysteresis,
        _check_scale_growth_tracker=lambda name: (scaler._scale, scaler._growth_tracker),
    )

    def step(finite):
        scaler._per_optimizer_states = {0: {"found_inf_per_device": {0: torch.tensor(0.0 if finite else 1.0)}}}
        scaler.update()

    return lambda word: run(word, step, lambda: scaler._scale)


def deepspeed(**arguments):
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist = _NOT_RANK_0
    return _deepspeed(loss_scaler.DynamicLossScaler, **arguments)


def deepspeed_2025_02(**arguments):
    import torch

    scope = {"torch": torch, "dist": _NOT_RANK_0}
    for name in ("LossScalerBase", "DynamicLossScaler"):
        kind = taken("deepspeed aside", "deepspeed/runtime/fp16/loss_scaler.py", name, scope)
    return _deepspeed(kind, **arguments)


# Only rank 0 prints.
_NOT_RANK_0 = types.SimpleNamespace(get_rank=lambda: 1)


def _deepspeed(
    kind,
    initial_scale=2.0**16,
    growth_factor=2.0,
    growth_interval=1000,
    min_scale=1.0,
    hysteresis=2,
    consecutive_hysteresis=False,
):
    scaler = kind(
        init_scale=initial_scale,
        scale_window=growth_interval,
        min_scale=min_scale,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
    )
    # An attribute, and no argument of the constructor.
    scaler.scale_factor = growth_factor
    return lambda word: run(word, lambda finite: scaler.update_scale(not finite), lambda: scaler.loss_scale, Exception)


def megatron(
    initial_scale=2.0**32,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    min_scale=1.0,
    hysteresis=2,
):
    import torch
    from megatron.core.optimizer import grad_scaler

    def on_cpu(values, device=None, **options):
        return torch.tensor(values, **options)

    grad_scaler.torch = types.SimpleNamespace(tensor=on_cpu, max=torch.max, float=torch.float)
    scaler = grad_scaler.DynamicGradScaler(
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis
    )
    return lambda word: run(word, lambda finite: scaler.update(not finite), lambda: scaler.scale)


def colossalai(
    initial_scale=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    min_scale=None,
    max_scale=None,
    hysteresis=2,
):
    from colossalai.amp.naive_amp.grad_scaler import base_grad_scaler, dynamic_grad_scaler

    cpu = types.SimpleNamespace(get_current_device=lambda: "cpu", device_count=lambda: 1)
    base_grad_scaler.get_accelerator = dynamic_grad_scaler.get_accelerator = lambda: cpu
    scaler = dynamic_grad_scaler.DynamicGradScaler(
        initial_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
    )
    return lambda word: run(word, lambda finite: scaler.update(not finite), lambda: scaler.scale)


def fairseq(
    initial_scale=2.0**15,
    growth_factor=2.0,
    growth_interval=2000,
    tolerance=0.0,
    threshold=None,
    min_loss_scale=1e-4,
):
    kind = taken("fairseq aside", "fairseq/optim/dynamic_loss_scaler.py", "DynamicLossScaler", {})
    scaler = kind(initial_scale, growth_factor, growth_interval, tolerance, threshold, min_loss_scale)

    def step(finite):
        if finite:
            scaler.check_overflow(1.0)
            scaler.update()
        else:
            with contextlib.suppress(OverflowError):
                scaler.check_overflow(INF)

    return lambda word: run(word, step, lambda: scaler.loss_scale, FloatingPointError)


@functools.cache
def keras(initial_scale=2.0**15, growth_interval=2000):
    import keras as package
    import tensorflow as tf

    scaler = package.optimizers.LossScaleOptimizer(
        package.optimizers.SGD(0.0), initial_scale=initial_scale, dynamic_growth_steps=growth_interval
    )
    weight = tf.Variable([1.0])
    scaler.build([weight])
    reset = [(scaler.dynamic_scale, initial_scale), (scaler.step_counter, 0)]
    return _in_graph(lambda grad: scaler.apply([grad], [weight]), scaler.dynamic_scale, reset)


@functools.cache
def tf_keras(initial_scale=2.0**15, growth_factor=2.0, growth_interval=2000):
    import tensorflow as tf
    import tf_keras as package

    scaler = package.mixed_precision.LossScaleOptimizer(
        package.optimizers.legacy.SGD(0.0), initial_scale=initial_scale, dynamic_growth_steps=growth_interval
    )
    weight = tf.Variable([1.0])
    scaler.apply_gradients([(tf.constant([1.0]), weight)])  # Makes its variables.
    state = scaler._loss_scale
    # Its optimizer always passes 2; TensorFlow 1's class for the same rule takes it as an argument.
    state._multiplier = growth_factor
    reset = [(state.current_loss_scale, initial_scale), (state.counter, 0)]
    return _in_graph(lambda grad: scaler.apply_gradients([(grad, weight)]), state.current_loss_scale, reset)


def _in_graph(apply, scale, reset):
    """Compiled once for all words, each of which begins anew."""
    import tensorflow as tf

    @tf.function
    def scales_of(word):
        scales = tf.TensorArray(tf.float32, tf.shape(word)[0])
        for step in tf.range(tf.shape(word)[0]):
            apply(tf.where(word[step], [1.0], [INF]))
            scales = scales.write(step, tf.convert_to_tensor(scale))
        return scales.stack()

    def run_anew(word):
        for variable, value in reset:
            variable.assign(value)
        return [float(s) for s in scales_of(tf.constant(word, tf.bool)).numpy()]

    return run_anew


def flax(initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=2.0**-126):
    import jax
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    def step(scaler, finite):
        slope = jnp.where(finite, 1.0, INF)
        scaler = scaler.value_and_grad(lambda weight: weight * slope)(jnp.float32(0.0)).dynamic_scale
        return scaler, scaler.scale

    scaler = DynamicScale(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        scale=jnp.float32(initial_scale),
        fin_steps=jnp.int32(0),
        minimum_scale=min_scale,
    )
    return lambda word: [float(s) for s in jax.lax.scan(step, scaler, jnp.array(word, bool))[1]]


def jmp(initial_scale=2.0**15, growth_factor=2.0, growth_interval=2000, min_scale=1.0):
    import jax.numpy as jnp
    import jmp as package
    import numpy as np

    # Not under jit, where jmp forgets the minimum.
    scaler = package.DynamicLossScale(
        jnp.float32(initial_scale), period=growth_interval, factor=growth_factor, min_loss_scale=jnp.float32(min_scale)
    )

    def step(finite):
        nonlocal scaler
        scaler = scaler.adjust(np.asarray(finite))

    return lambda word: run(word, step, lambda: scaler.loss_scale)


def optax_apply_if_finite(max_consecutive_errors=2):
    import jax
    import jax.numpy as jnp
    import optax

    transform = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors)

    def step(state, finite):
        update, state = transform.update(jnp.where(finite, 1.0, INF), state)
        return state, jnp.logical_not(jnp.isfinite(update))

    # 1 where a non-finite update is let through.
    state = transform.init(jnp.float32(0.0))
    return lambda word: [float(bad) for bad in jax.lax.scan(step, state, jnp.array(word, bool))[1]]


def mxnet(initial_scale=2.0**16, growth_interval=2000, max_scale=2.0**24):
    stand_in = Anything()
    scope = {"ag": types.SimpleNamespace(pause=contextlib.nullcontext), "logging": stand_in, "nd": stand_in}
    all_finite = []
    stand_in.__class__.asnumpy = lambda self: all_finite[0]
    scope["multi_all_finite"] = stand_in
    scaler = taken("mxnet", "mxnet/contrib/amp/loss_scaler.py", "LossScaler", scope)()
    scaler._loss_scale = scaler._next_loss_scale = initial_scale
    scaler._max_loss_scale, scaler._scale_seq_len = max_scale, growth_interval
    parameter = types.SimpleNamespace(_grad=[stand_in])

    def step(finite):
        all_finite[:] = [finite]
        assert scaler.has_overflow([parameter]) == (not finite)

    return lambda word: run(word, step, lambda: scaler.loss_scale)


def mindspore(initial_scale=2.0**24, growth_factor=2.0, growth_interval=2000):
    scope = {"validator": Anything(), "LossScaleManager": object, "nn": None}
    kind = taken("mindspore", "mindspore/train/loss_scale_manager.py", "DynamicLossScaleManager", scope)
    scaler = kind(initial_scale, growth_factor, growth_interval)
    return lambda word: run(
        word, lambda finite: scaler.update_loss_scale(not finite), scaler.get_loss_scale, RuntimeError
    )


def paddle(initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, hysteresis=1):
    import paddle as package

    # Without a GPU it disables itself, so that the state of an enabled one is given to its rule.
    state = types.SimpleNamespace(
        _enable=True,
        # A scalar: its message takes float() of the scale, which NumPy 2.4 refuses for one of the shape [1].
        _scale=package.to_tensor(initial_scale, "float32"),
        _incr_ratio=growth_factor,
        _decr_ratio=backoff_factor,
        _incr_every_n_steps=growth_interval,
        _decr_every_n_nan_or_inf=hysteresis,
        _incr_count=0,
        _decr_count=0,
    )

    def step(finite):
        state._cache_found_inf = not finite
        with contextlib.redirect_stdout(io.StringIO()):
            package.amp.GradScaler._update(state)

    return lambda word: run(word, step, lambda: state._scale)


def paddle_static(initial_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, hysteresis=1):
    import paddle as package
    from paddle.static.amp.amp_nn import update_loss_scaling

    scale = package.to_tensor([initial_scale], "float32")
    good, bad = (package.to_tensor([0], "int32") for _ in range(2))

    def step(finite):
        update_loss_scaling(
            [package.to_tensor([1.0], "float32")],
            package.to_tensor([not finite]),
            scale,
            good,
            bad,
            growth_interval,
            hysteresis,
            growth_factor,
            backoff_factor,
        )

    return lambda word: run(word, step, lambda: scale)


def chainer(interval=1000):
    import warnings

    import numpy

    scope = {"math": math, "warnings": warnings, "numpy": numpy}
    kind = taken("chainer", "chainer/optimizer.py", "Optimizer", scope)
    scaler = kind.__new__(kind)
    scaler.loss_scaling(interval)
    parameter = types.SimpleNamespace(device=types.SimpleNamespace(xp=numpy))
    scaler.target = types.SimpleNamespace(namedparams=lambda: [("weight", parameter)])

    def step(finite):
        parameter.grad = numpy.array([1.0 if finite else INF])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.check_nan_in_grads()
        scaler.update_loss_scale()

    return lambda word: run(word, step, lambda: scaler._loss_scale)


def nnabla(initial_scale=8.0, growth_factor=2.0, growth_interval=2000):
    path = "nnabla/experimental/mixed_precision_training.py"
    kind = taken("nnabla aside", path, "DynamicLossScalingUpdater", {})
    anything, scales, flags = Anything(), [], []

    class Solver(Anything):
        def zero_grad(self):
            # Each attempt begins here, also those that repeat a non-finite step.
            scales.append(float(updater.scale))

        def check_inf_or_nan_grad(self):
            return not flags.pop()

    updater = kind(Solver(), anything, anything, scale=initial_scale, scaling_factor=growth_factor, N=growth_interval)

    def scales_of(word):
        flags[:] = reversed(word)
        with contextlib.suppress(IndexError):
            while flags:
                updater.update()
        return [*scales[1:], float(updater.scale)][: len(word)]

    return scales_of


# By preset: the driver, and the distributions it needs.
PEERS = {
    "chainer": (chainer, ["chainer"]),
    "colossalai": (colossalai, ["colossalai", "torch"]),
    "deepspeed": (deepspeed, ["deepspeed"]),
    "deepspeed_2025_02": (deepspeed_2025_02, ["deepspeed aside", "torch"]),
    "fairscale": (fairscale, ["fairscale"]),
    "fairseq": (fairseq, ["fairseq aside"]),
    "flax": (flax, ["flax"]),
    "jmp": (jmp, ["jmp"]),
    "keras": (keras, ["keras"]),
    "megatron": (megatron, ["megatron-core", "torch"]),
    "mindspore": (mindspore, ["mindspore"]),
    "mxnet": (mxnet, ["mxnet"]),
    "nemo": (nemo, ["nemo_toolkit", "torch"]),
    "nnabla": (nnabla, ["nnabla aside"]),
    "optax_apply_if_finite": (optax_apply_if_finite, ["optax"]),
    "paddle": (paddle, ["paddlepaddle"]),
    "paddle_static": (paddle_static, ["paddlepaddle"]),
    "pytorch": (pytorch, ["torch"]),
    "tf_keras": (tf_keras, ["tf_keras"]),
}


def answers(name, jobs):
    """One list of scales for each job."""
    return [PEERS[name][0](**arguments)(word) for arguments, word in jobs]


def main():
    """Reads jobs, writes the version and the scales; whatever a package prints goes to stderr."""
    name, jobs = sys.argv[1], json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = {"version": installed(PEERS[name][1][0]).version, "scales": answers(name, jobs)}
    print(json.dumps(found), flush=True)
    # Some packages crash when the interpreter takes them down.
    os._exit(0)


if __name__ == "__main__":
    main()
