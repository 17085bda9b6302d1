"""Measures what a coarse tail (`sampling.tail`) costs: how it ranks a group's samples."""
