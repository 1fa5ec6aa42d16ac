"""A learning-rate range test that leaves everything as it was, to the bit."""

import keras
import numpy as np

import halfstep as hs

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
digits = hs.loops.tasks.load("digits")
layers = [keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input([8, 8, 1]), *layers, keras.layers.Dense(10, dtype="float32")])
optimizer = keras.optimizers.Adam(1e-3)
step = hs.TrainStep(model, digits.loss, optimizer)

optimizer.build(model.trainable_variables)
everything = [*model.variables, *optimizer.variables, *step.loss_scaler.variables]
before = hs.snapshot(everything)
bits = [np.asarray(one).tobytes() for one in everything]

rates, losses = np.geomspace(1e-5, 1.0, 26), []
for rate, batch in zip(rates, digits.dataset(64, seed=1), strict=False):  # not the batches of the run
    optimizer.learning_rate = rate
    losses.append(float(step(batch)["loss"]))
before.restore_unless(False)

assert bits == [np.asarray(one).tobytes() for one in everything]
best = rates[int(np.argmin(np.convolve(losses, [1 / 3] * 3, "same")[1:-1])) + 1]
print(f"the loss falls until about {best:.0e}: take a tenth of it")
optimizer.learning_rate = best / 10
print(hs.Loop(step, digits.dataset(64, seed=0), steps_per_call=50).run(200))
