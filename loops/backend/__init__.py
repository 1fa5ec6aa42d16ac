"""All uses of private names of TensorFlow and Keras in `loops`."""
