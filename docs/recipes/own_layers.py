"""Own layers under 16 bits: the commonest edits when a program is ported, each wrong and right."""

import keras
import numpy as np
import tensorflow as tf

keras.config.set_dtype_policy("mixed_float16")
x, mask = tf.constant([[1.0, 2.0, 3.0]], tf.float16), tf.constant([[True, True, False]])
inputs = tf.random.stateless_normal([256, 3], seed=(0, 1), mean=1e5, stddev=1e3)  # metres, bytes, prices


def show(name, function, *arguments):
    try:
        value = np.asarray(function(*arguments))
        print(f"{name}: {value.dtype} {value.ravel()[:3]}")
    except tf.errors.InvalidArgumentError as error:
        print(f"{name}: {str(error).partition('cannot compute ')[2].partition(' [Op')[0]}")


layer = keras.layers.Lambda
show("wrong, random", layer(lambda x: x + tf.random.normal([1, 3])), x)
show("right, random", layer(lambda x: x + tf.random.normal([1, 3], dtype=x.dtype)), x)
show("wrong, concat", layer(lambda x: tf.concat([x, tf.ones([1, 1])], axis=1)), x)
show("right, concat", layer(lambda x: tf.concat([x, tf.ones([1, 1], x.dtype)], axis=1)), x)
show("wrong, Lambda", layer(lambda x: x * tf.constant(0.5)), x)
show("right, Lambda", layer(lambda x: x * 0.5), x)
show("wrong, mask  ", layer(lambda x: tf.nn.softmax(x + tf.cast(~mask, x.dtype) * -1e9)), x)
show("right, mask  ", layer(lambda x: tf.nn.softmax(tf.where(mask, x, x.dtype.min))), x)
half, single = keras.layers.Normalization(), keras.layers.Normalization(dtype="float32")
half.adapt(inputs)
single.adapt(inputs)
show("wrong, adapt ", half, inputs[:1])
show("right, adapt ", single, inputs[:1])
