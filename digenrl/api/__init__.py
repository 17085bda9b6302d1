"""The HTTP API as one: its description, and what of it is served beside the scheduler."""
