"""What TensorBoard would show."""

import tensorflow as tf


def events(folder):
    """The points of each curve as (step, value), in the order they were written."""
    curves = {}
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name == "scalars"
                curves.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return curves
