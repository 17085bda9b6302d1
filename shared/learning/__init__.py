"""Learning without tensors: algorithms, advantages, windows, seeds and prompts."""
