"""Timeouts and sizes of a rollout worker, each with what happens beyond it."""

MAX_PENDING_RESULTS = 2
"""The device waits while this many results are being stored."""
DRAIN_S = 2.0
"""Results that are not stored this long after a stop are lost, and others repeat the work."""
IDLE_RECHECK_S = 2.0
"""Seconds after which an idle encoder checks for lost conditions and further steps."""
