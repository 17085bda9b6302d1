"""Writes the metrics of a run's steps to TensorBoard and Weights & Biases."""
