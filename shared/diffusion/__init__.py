"""What rollout and trainer must do identically: schedules, transitions, sampling, models, LoRA.

The only part of `shared` that knows torch.
"""
