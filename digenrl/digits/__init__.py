"""The demo's model and its judges, made from scikit-learn's handwritten digits."""
