"""Code that rollout and trainer must run identically: schedules, transitions, sampling, models,
LoRA.

The only part of `shared` that knows torch.
"""
