"""Timeouts, attempts and sizes of a reward worker, each with what happens beyond it."""

MAX_TASK_LOOKUPS = 3
"""A result without a task is refused after this many lookups."""
TASK_LOOKUP_INTERVAL_S = 0.5
"""Seconds between two lookups of a task, by which a result may be scored late."""
MAX_FRAGMENTS = 2
"""Further fragments wait: one is scored while the media of the next are fetched."""
HANG_CHECK_S = 0.5
"""Seconds between two checks for a scorer that hangs, by which it is noticed late."""
LAST_ATTEMPT = 2
"""From this attempt on a fragment without any score is accepted."""
MAX_RETRIES = 2
"""A sample that fails again after this many retries, alone, has no score."""
MAX_BODY = 256 << 20
"""A larger request is refused with 413."""
MAX_ITEMS = 1024
"""A request with more samples is refused."""
MAX_BYTES = 4 << 20
"""A larger file is refused: it is no source."""
FIRST_WAIT_S = 0.1
"""Seconds before the first retry at a server; each further wait is twice as long."""
MAX_WAIT_S = 5.0
"""Waits between retries grow no longer, so that a server that is back is noticed."""
MAX_ANSWER_BYTES = 4 << 20
"""A longer response is refused unread: a response has one short result per sample."""
CONNECT_S = 10.0
"""A connection to a judge that takes longer counts as failed and is retried."""
BUILD_S = 1800.0
"""An environment whose packages take longer to install is refused."""
EXIT_TIMEOUT_S = 10.0
"""A process that has closed its output and not ended after this long is killed."""
SILENCE_TIMEOUT_S = 60.0
"""A request is sent again after this many seconds of silence."""
