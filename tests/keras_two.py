"""Optimizers of Keras 2: a class of their shape, and one of tf-keras itself where that is installed."""

import importlib.util

import tensorflow as tf


class Momentum:
    """As tf_keras.optimizers.SGD(0.5, momentum=0.5, weight_decay=...): built once, with slots found by variable."""

    name = "momentum"

    def __init__(self, weight_decay=None, spoils=False):
        self.iterations = tf.Variable(0, dtype=tf.int64)
        self.weight_decay, self.spoils, self.excluded = weight_decay, spoils, []
        self._variables, self._index_dict = [self.iterations], None

    @property
    def variables(self):
        return self._variables

    def _var_key(self, variable):
        return variable._unique_id

    def _use_weight_decay(self, variable):
        return self._var_key(variable) not in map(self._var_key, self.excluded)

    def build(self, var_list):
        if self._index_dict is None:
            self._index_dict = {self._var_key(variable): place for place, variable in enumerate(var_list)}
            self.slots = [tf.Variable(tf.zeros_like(variable)) for variable in var_list]
            self._variables += self.slots

    def apply_gradients(self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs):
        assert skip_gradients_aggregation
        pairs = list(grads_and_vars)
        self.build([variable for _, variable in pairs])
        tf.distribute.get_replica_context().merge_call(self._update, args=(pairs,))
        return self.iterations

    def _update(self, strategy, pairs):
        for grad, variable in pairs:
            slot = self.slots[self._index_dict[self._var_key(variable)]]
            strategy.extended.update(variable, self._update_one, args=(slot, grad), group=False)
        self.iterations.assign_add(1)

    def _update_one(self, variable, slot, grad):
        slot.assign(0.5 * slot + tf.convert_to_tensor(grad))
        variable.assign_sub(0.5 * slot / (slot - slot if self.spoils else 1.0))


def of_tf_keras():
    import tf_keras

    return tf_keras.optimizers.SGD(0.5, momentum=0.5, jit_compile=False)


MAKERS = [Momentum, *([of_tf_keras] if importlib.util.find_spec("tf_keras") else [])]
