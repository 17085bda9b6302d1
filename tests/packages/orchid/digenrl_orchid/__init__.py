"""A package that brings a model family and scorers: what others may write, outside of our tree."""
