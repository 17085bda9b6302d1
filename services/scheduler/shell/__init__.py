"""The scheduler's input and output: streams, store, HTTP API, and the loop around the core."""
