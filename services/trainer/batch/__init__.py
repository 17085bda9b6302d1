"""Fetches the groups of a batch, trains them in order, and measures them."""
