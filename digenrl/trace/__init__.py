"""Traces a run on fake tensors: what it takes of memory, arithmetic and storage, before a GPU is
rented. Only `fakes`, `meter` and `runs` import torch."""
