"""What TensorBoard would show."""

import tensorflow as tf


def values(folder):
    """All that was written, in that order: the plugin, the tag, the step, the value, and what is said of it."""
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin, said = value.metadata.plugin_data.plugin_name, value.metadata.summary_description
                yield plugin, value.tag, event.step, tf.make_ndarray(value.tensor), said


def events(folder):
    """The points of each curve as (step, value), in the order they were written."""
    curves = {}
    for plugin, tag, step, found, _ in values(folder):
        assert plugin in ("scalars", "text")
        shown = float(found) if plugin == "scalars" else found[0].decode()
        curves.setdefault(tag, []).append((step, shown))
    return curves


def descriptions(folder):
    """What is said of each curve."""
    return {tag: said for _, tag, _, _, said in values(folder)}
