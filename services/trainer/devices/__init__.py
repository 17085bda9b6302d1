"""Decides which of the trainer's devices trains, and which is lent to generate."""
