"""What TensorFlow and Keras do not offer publicly: each private name with what happens when it is gone."""
