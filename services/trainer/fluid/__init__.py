"""A fluid device: one process that generates, trains, sums with the others and takes each step."""
