"""The limits of every service: a change of one is a change here as well."""

from datetime import timedelta
from importlib import import_module

import pytest

from tests.paths import ROOT

LIMITS: dict[str, dict[str, object]] = {
    "services.reward.limits": {
        "MAX_TASK_LOOKUPS": 3,
        "TASK_LOOKUP_INTERVAL_S": 0.5,
        "MAX_FRAGMENTS": 2,
        "DEADLINE_FACTOR": 10,
        "MIN_DEADLINE_S": 120.0,
        "FIRST_DEADLINE_S": 1800.0,
        "HANG_CHECK_S": 0.5,
        "LAST_ATTEMPT": 2,
        "MAX_RETRIES": 2,
        "MAX_BODY": 268_435_456,
        "MAX_ITEMS": 1024,
        "MAX_BYTES": 4_194_304,
        "FIRST_WAIT_S": 0.1,
        "MAX_WAIT_S": 5.0,
        "MAX_ANSWER_BYTES": 4_194_304,
        "CONNECT_S": 10.0,
        "BUILD_S": 1800.0,
        "EXIT_TIMEOUT_S": 10.0,
        "SILENCE_TIMEOUT_S": 60.0,
    },
    "services.rollout.limits": {
        "MAX_PENDING_RESULTS": 2,
        "DRAIN_S": 2.0,
        "IDLE_RECHECK_S": 2.0,
    },
    "services.scheduler.limits": {
        "LEASE_S": 5.0,
        "NAME_TAKEOVER_S": 2.5,
        "DUPLICATE_NAME_S": 1.5,
        "DEADLINE_FACTOR": 10,
        "MIN_DEADLINE_S": 120.0,
        "FIRST_DEADLINE_S": 1800.0,
        "STALL_S": 5.0,
        "ALL_RETURN_S": 60.0,
        "MAX_REPORTS": 32,
        "MAX_KEPT_DECISIONS": 64,
        "STEP_WAIT_S": 0.5,
        "MAX_REPORT_DELAY_S": 3.0,
        "MIN_EXCHANGE_S": 60.0,
        "LAST_REPORT_S": 5.0,
        "COMMIT_TIMEOUT_S": 120.0,
        "MAX_ROUNDS": 6,
        "MAX_COMMIT_ATTEMPTS": 2,
        "MAX_BATCH_ATTEMPTS": 8,
        "LEASE_TTL_S": 3.0,
        "LEASE_RENEW_S": 1.0,
        "RENEWED_WITHIN_S": 2.5,
        "LEASE_RETRY_S": 0.2,
        "ABANDONED_S": 5.0,
        "HOLDER_HEAD_START_S": 1.5,
        "LEASE_ENTRY_BYTES": 2048,
        "RETRY_S": 0.5,
        "STREAM_CHECK_S": 1.0,
        "MAX_FILLED": 0.9,
        "NATS_ALARM_DELAY_S": 6.0,
        "CLEANUP_DELAY_S": 1.0,
        "INTERRUPTED_WRITE_AGE_S": 3600.0,
        "MAX_CHECKED_COPIES": 32,
        "VERSION_CHECK_S": 5.0,
        "PROBE_INTERVAL_S": 3.0,
        "STORE_ALARM_DELAY_S": 6.0,
        "PROBE_TIMEOUT_S": 6.1,
        "ROSTER_CHECK_S": 0.5,
        "TICK_S": 1.0,
        "MAX_IDLE_S": 10.0,
        "ALARM_STEPS": 20,
        "APPEND_WAIT_S": 1.0,
        "MAX_WAITING_ENTRIES": 10_000,
        "MAX_CONCURRENT_SENDS": 16,
        "FORWARD_TIMEOUT_S": 10.0,
        "PUBLISH_TIMEOUT_S": 4.0,
        "USAGE_CHECK_S": 6e-05,
        "MAX_READING_S": 0.05,
        "MAX_KEPT_COMMITS": 11,
        "COLLECT_S": 600.0,
        "IDLE_CHECK_S": 0.2,
        "MAX_IDLE_CHECKS": 3000,
        "MAX_LETTERS": 10_000,
        "MAX_REASON": 4000,
        "MAX_SUBJECT": 300,
        "MAX_LETTER_BYTES": 65_536,
    },
    "services.trainer.limits": {
        "DEADLINE_CHECK_S": 0.2,
        "STEP_WAIT_S": 5.0,
        "FIRST_VERSION_S": 60.0,
        "LOST_VERSION_RETRY_S": 30.0,
        "MAX_SUMS": 2,
        "RANK_TIMEOUT": timedelta(seconds=31536000),
        "MAX_SENT_GROUPS": 2,
        "DRAIN_S": 2.0,
        "GROUP_TIMEOUT_S": 2.5,
        "GROUP_POLL_S": 0.1,
        "MAX_KEPT_GROUPS": 3,
        "MAX_PENDING_RESULTS": 2,
        "GROUP_EXCHANGE_POLL_S": 0.05,
        "GRACE_S": 3.0,
        "WATCHDOG_S": 600.0,
        "STORE_EXCHANGE_POLL_S": 0.05,
        "PRESENCE_S": 2.0,
        "MAX_UNPACKED_GROUPS": 3,
        "SOLO_MEETING_S": 3600.0,
        "MAX_CACHED_BYTES": 536_870_912,
    },
}
"""Name and value of every limit, by module."""


@pytest.mark.parametrize("module", LIMITS)
def test_a_service_has_exactly_these_limits(module: str) -> None:
    limits = {name: each for name, each in vars(import_module(module)).items() if name.isupper()}
    assert limits == LIMITS[module]


def test_every_file_of_limits_is_in_the_table() -> None:
    files = [path.relative_to(ROOT) for path in ROOT.glob("[ds]*/**/limits.py")]
    assert {".".join(each.with_suffix("").parts) for each in files} == set(LIMITS)
