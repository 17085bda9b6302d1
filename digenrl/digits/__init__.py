"""The demo's model and its rewards, made from scikit-learn's handwritten digits."""
