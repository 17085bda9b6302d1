"""Timeouts, attempts and sizes of the scheduler, each with what happens beyond it."""

LEASE_S = 5.0
"""A worker that has not reported for this long has left, and others take over its work."""
NAME_TAKEOVER_S = 2.5
"""After two missing statuses a worker of the same name takes the place."""
DUPLICATE_NAME_S = 1.5
"""A worker that reports this long after another of its name began is a duplicate."""
STALL_S = 5.0
"""After a longer gap between ticks (scheduler or broker stood still) all deadlines restart."""
ALL_RETURN_S = 60.0
"""The run fails after all devices have returned everything for this long."""
MAX_REPORTS = 32
"""More reports wait for another turn: with 4,096 devices this many take some 10 ms."""
MAX_KEPT_DECISIONS = 64
"""Older decisions are forgotten."""
STEP_WAIT_S = 0.5
"""Members that have stepped wait this long for the others, then continue without them."""
MAX_REPORT_DELAY_S = 3.0
"""A member that reports an older version for this long has gone back to it. For this long after a
restart of the scheduler, a device without the newest version gets no fragments."""
MIN_EXCHANGE_S = 60.0
"""No exchange is given up earlier: members meet and form the total in this time."""
LAST_REPORT_S = 5.0
"""A member without a report this long after an exchange has expired is out."""
COMMIT_TIMEOUT_S = 120.0
"""After this long without a step, or without a commit, another member is named."""
MAX_ROUNDS = 6
"""After this many failed exchanges in a row, the batch is trained again."""
MAX_COMMIT_ATTEMPTS = 2
"""After being named this often each, members that have stepped lose the batch to others."""
MAX_BATCH_ATTEMPTS = 8
"""The run fails after a batch was lost, or failed without a process that died, this often."""
LEASE_TTL_S = 3.0
"""A scheduler that has not renewed the lease for this long has lost it to another."""
LEASE_RENEW_S = 1.0
"""With a longer interval a single late renewal loses the lease."""
RENEWED_WITHIN_S = 2.5
"""This long after a renewal no command is sent any more: shorter than the lease."""
LEASE_RETRY_S = 0.2
"""Seconds between two attempts to acquire or renew the lease; longer ones delay a takeover."""
ABANDONED_S = 5.0
"""An older entry has no holder, though it may remain after the broker's clock was set back."""
HOLDER_HEAD_START_S = 1.5
"""After an outage of the broker, others try for the lease only after this long."""
LEASE_ENTRY_BYTES = 2048
"""With smaller entries a full disk still takes renewals for a while, and the alarm is late."""
RETRY_S = 0.5
"""Seconds between two attempts at a broker that does not respond."""
STREAM_CHECK_S = 1.0
"""Seconds between two checks of the streams, by which an alarm about a stream is late."""
MAX_FILLED = 0.9
"""A stream that is filled beyond this share raises an alarm."""
NATS_ALARM_DELAY_S = 6.0
"""NATS raises an alarm after storing nothing for this long, although it responds."""
CLEANUP_DELAY_S = 1.0
"""Cleanup waits this long after a commit, while devices get the next batch's first fragments."""
INTERRUPTED_WRITE_AGE_S = 3600.0
"""Remains of a write that are older than this are deleted: a longer write would fail."""
MAX_CHECKED_COPIES = 32
"""Missing copies of older records are not found at the start."""
VERSION_CHECK_S = 5.0
"""Seconds between two deletions of old versions, for which they take space."""
PROBE_INTERVAL_S = 3.0
"""Seconds between two probes of a store, by which an alarm about it is late."""
STORE_ALARM_DELAY_S = 6.0
"""A store that has accepted no write for this long raises an alarm."""
PROBE_TIMEOUT_S = STORE_ALARM_DELAY_S + 0.1
"""A probe fails after this long: enough for an alarm, though clocks of event loops run early."""
ROSTER_CHECK_S = 0.5
"""Seconds between two checks of leases, by which a departure is noticed late."""
TICK_S = 1.0
"""Seconds between two ticks, by which deadlines are noticed late."""
MAX_IDLE_S = 10.0
"""An open batch on which no device works for this long raises an alarm."""
ALARM_STEPS = 20
"""A step that has trained nothing raises an alarm until it is older than this many steps."""
APPEND_WAIT_S = 1.0
"""A request is answered after this long, even if the log has not stored it yet."""
MAX_WAITING_ENTRIES = 10_000
"""While the store does not respond, further entries are lost to the run's log."""
MAX_CONCURRENT_SENDS = 16
"""Further commands wait for another burst; statuses are handled in between."""
FORWARD_TIMEOUT_S = 10.0
"""A forwarded request fails with 503 after this long."""
PUBLISH_TIMEOUT_S = 4.0
"""A request that is not stored within this time fails with 503."""
USAGE_CHECK_S = 6e-5
"""Seconds between two checks of devices, per worker; shorter ones take too much of a core."""
MAX_READING_S = 0.05
"""After reading stored messages for this long, other tasks have a turn."""
MAX_KEPT_COMMITS = 11
"""Older commit times are forgotten: the pace is the pace of the newest ten steps."""
COLLECT_S = 600.0
"""Seconds between two full collections, for which cyclic garbage takes memory."""
IDLE_CHECK_S = 0.2
"""Seconds between two checks for a calm moment to collect in."""
MAX_IDLE_CHECKS = 3000
"""After this many checks a collection runs at any moment and stops all threads."""
MAX_LETTERS = 10_000
"""Further dead letters of a run are only logged."""
MAX_REASON = 4000
"""Characters of a letter's reason; the rest is cut."""
MAX_SUBJECT = 300
"""Characters of a letter's subject; the rest is cut."""
MAX_LETTER_BYTES = 64 * 1024
"""Bytes of a message that a letter keeps; the rest is cut."""
