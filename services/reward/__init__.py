"""Scores generated media. A score that fails is a failure, never a 0."""
