"""Measures how a coarse tail (`sampling.tail`) ranks samples, and how all steps rank them."""
