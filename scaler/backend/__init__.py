"""What TensorFlow and Keras do not offer publicly: each private name, and what happens without it."""
