"""What TensorBoard would show."""

import tensorflow as tf


def events(folder):
    """The points of each curve as (step, value), in the order they were written."""
    curves = {}
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin, found = value.metadata.plugin_data.plugin_name, tf.make_ndarray(value.tensor)
                assert plugin in ("scalars", "text")
                shown = float(found) if plugin == "scalars" else found[0].decode()
                curves.setdefault(value.tag, []).append((event.step, shown))
    return curves


def descriptions(folder):
    """What is said of each curve."""
    records = (record for path in folder.glob("events.*") for record in tf.data.TFRecordDataset(str(path)))
    values = (value for record in records for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value)
    return {value.tag: value.metadata.summary_description for value in values}
