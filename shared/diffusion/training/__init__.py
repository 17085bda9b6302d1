"""The gradient of a batch: by the trainer, or by a rollout device that computes a part of it."""
