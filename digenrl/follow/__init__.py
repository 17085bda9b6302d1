"""The metrics of a run's steps, where people look at curves."""
