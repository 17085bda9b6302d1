"""What a run learns by, without tensors: algorithms, advantages, windows, seeds and prompts."""
