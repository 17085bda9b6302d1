"""How many groups the trainer's devices should generate."""
