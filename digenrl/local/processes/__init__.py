"""Child processes of a local run: starting, supervising, GPUs and ports."""
