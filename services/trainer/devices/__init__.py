"""The trainer's devices: which of them trains, and which is lent to generate."""
