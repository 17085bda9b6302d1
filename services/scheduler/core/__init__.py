"""The pure scheduler: ``step(plan, state, event, now)`` and the decisions that it makes."""
