"""Train on batches from an iterator of one's own, and go on from the middle of an epoch, bit for bit."""

import keras
import numpy as np

import halfstep as hs

digits = hs.loops.tasks.load("digits")


class Shuffled:
    """Batches of 32 images without an end, each epoch in another order."""

    given = 0

    def __iter__(self):
        return self

    def __next__(self):
        epoch, place = divmod(self.given, len(digits.images) // 32)
        order = np.random.default_rng([1, epoch]).permutation(len(digits.images))
        self.given += 1
        rows = order[place * 32 :][:32]
        return digits.images[rows], digits.labels[rows]

    def get_state(self):
        return {"given": self.given}

    def set_state(self, state):
        self.given = state["given"]


def train(folder, steps, seed):
    keras.utils.set_random_seed(seed)  # A resumed run does not depend on it.
    layers = [keras.layers.Flatten(), keras.layers.Dense(64, "relu", dtype="mixed_float16"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input([8, 8, 1]), *layers])
    step = hs.TrainStep(model, digits.loss, keras.optimizers.Adam(1e-2))
    checkpoint = hs.Checkpoint(folder, every=50, resume=True)
    counters = hs.Loop(step, Shuffled(), steps_per_call=10, actions=[checkpoint]).run(steps)
    print(f"{folder}: {counters.data} steps, accuracy {digits.accuracy(model):.2f}")
    return model.get_weights()


whole = train("whole", 100, seed=0)
train("stopped", 70, seed=0)
print("the same bits:", all(map(np.array_equal, whole, train("stopped", 100, seed=9))))
