"""What TensorFlow and Keras do not offer publicly: every private name of theirs that `loops` touches is in here."""
