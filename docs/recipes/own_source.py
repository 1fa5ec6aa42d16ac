"""Train on batches from an iterator of one's own, and go on from the middle of an epoch, bit for bit."""

import keras
import numpy as np

import loops
import scaler


class Shuffled:
    """Batches of rows without an end, each epoch in another order."""

    def __init__(self, x, y, size, seed):
        self.x, self.y, self.size, self.seed = x, y, size, seed
        self.given = 0

    def __iter__(self):
        return self

    def __next__(self):
        epoch, place = divmod(self.given, len(self.x) // self.size)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.x))
        rows = order[place * self.size :][: self.size]
        self.given += 1
        return self.x[rows], self.y[rows]

    def get_state(self):
        return {"given": self.given}

    def set_state(self, state):
        self.given = state["given"]


random = np.random.default_rng(0)
x = random.normal(size=(512, 16)).astype(np.float32)
y = (x[:, 0] * x[:, 1] > 0).astype(np.int32)


def train(folder, steps, seed):
    keras.utils.set_random_seed(seed)  # A resumed run does not depend on it.
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input([16]), *layers])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = loops.TrainStep(model, cross_entropy, keras.optimizers.Adam(1e-2), loss_scaler=scaler.LossScaler())
    checkpoint = loops.Checkpoint(folder, every=50, resume=True)
    loop = loops.Loop(step, Shuffled(x, y, 32, seed=1), steps_per_call=10, actions=[checkpoint])
    print(f"{folder}: {loop.run(steps).data} steps, accuracy {np.mean(np.argmax(model(x), axis=1) == y):.2f}")
    return [weight.numpy() for weight in model.weights]


whole = train("whole", 200, seed=0)
train("stopped", 70, seed=0)
resumed = train("stopped", 200, seed=9)
print("the same bits:", all(np.array_equal(one, other) for one, other in zip(whole, resumed, strict=True)))
