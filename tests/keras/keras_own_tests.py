"""Keras's own tests of its `LossScaleOptimizer`, and of optimizers on replicas, with ours in its place.

    python tests/keras/keras_own_tests.py [loss_scale_optimizer_test | optimizer_distribute_test]

They are imported from the installed Keras, which ships them. Exit status 1 if one fails that is not in `EXCEPTIONS`, or
if one that is passes.
"""

import importlib
import os
import sys
import unittest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import scaler

MODULES = {
    "loss_scale_optimizer_test": "keras.src.optimizers.loss_scale_optimizer_test",
    "optimizer_distribute_test": "keras.src.backend.tensorflow.optimizer_distribute_test",
}
EXCEPTIONS = {
    "test_gradient_accumulation": "It looks into Keras's accumulators, which are not used: on replicas under fit "
    "Keras's accumulation fails. Ours is compared with a single device in tests/distributed/test_fit_on_replicas.py.",
}
"""Tests that must fail, by name, with the reason. None of those of `LossScaleOptimizer` is among them."""


@keras.saving.register_keras_serializable()
class AroundSGD(scaler.LossScaleOptimizer):
    """The optimizer that tests of SGD on replicas are given. They look into two private names of SGD."""

    @property
    def _model_variables_moving_average(self):
        return self.inner_optimizer._model_variables_moving_average

    def _clip_gradients(self, grads):
        return self.inner_optimizer._clip_gradients(grads)


def load(name):
    """The module's tests, with our class for theirs."""
    module = importlib.import_module(MODULES[name])
    if name == "loss_scale_optimizer_test":
        module.LossScaleOptimizer = scaler.LossScaleOptimizer
    else:
        # These tests pass gradients of losses that were not scaled.
        module.SGD = lambda **arguments: AroundSGD(keras.optimizers.SGD(**arguments), scaler.NoScaling())
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def main(names):
    wrong = []
    for name in names or MODULES:
        result = unittest.TextTestRunner(verbosity=2, stream=sys.stdout).run(load(name))
        failed = {case.id().split(".")[-1] for case, _ in (*result.failures, *result.errors)}
        wrong += [f"{name}.{test} failed" for test in sorted(failed - set(EXCEPTIONS))]
        if name == "optimizer_distribute_test":
            wrong += [f"{name}.{test} passed: it is no exception" for test in sorted(set(EXCEPTIONS) - failed)]
        print(f"{name}: {result.testsRun} tests, {len(result.skipped)} skipped, {len(failed)} failed", flush=True)
        for test in sorted(failed & set(EXCEPTIONS)):
            print(f"  {test} is to fail. {EXCEPTIONS[test]}")
    for line in wrong:
        print(line)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
