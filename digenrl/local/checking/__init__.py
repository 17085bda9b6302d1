"""Checks of a recipe and of this machine before a run."""
