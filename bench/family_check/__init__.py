"""Compares an adapter of a model family with its own pipeline, on a small model."""
