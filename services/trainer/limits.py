"""Timeouts, attempts and sizes of the trainer, each with what happens beyond it."""

from datetime import timedelta

DEADLINE_CHECK_S = 0.2
"""Seconds between two checks of a loan's deadline, by which a loan may end late."""
STEP_WAIT_S = 5.0
"""A version that a member's own step does not reach in this time is downloaded."""
FIRST_VERSION_S = 60.0
"""After this long without the first version from its announced maker, another member creates it."""
LOST_VERSION_RETRY_S = 30.0
"""Seconds between two attempts at a version that nothing in the store leads to."""
RANK_TIMEOUT = timedelta(days=365)
"""A rank without a message for this long ends; its connection fails earlier if its peer is gone."""
MAX_SENT_GROUPS = 2
"""All ranks forget older groups at the same time; the first rank sends those again."""
DRAIN_S = 2.0
"""Results that are not stored this long after a stop are lost, and others repeat the work."""
GROUP_TIMEOUT_S = 2.5
"""A piece is returned if its group's data are missing for this long."""
GROUP_POLL_S = 0.1
"""Seconds between two checks for a group's data, by which a piece may begin late."""
MAX_KEPT_GROUPS = 3
"""Data of older groups are read again."""
MAX_PENDING_RESULTS = 2
"""The device waits while this many results are being stored."""
GROUP_EXCHANGE_POLL_S = 0.05
"""Seconds between two checks of an exchange that is being aborted."""
GRACE_S = 3.0
"""A process whose call or group has not ended this long after an abort ends, if it has a GPU."""
WATCHDOG_S = 600.0
"""This long after a round's limit, torch itself ends a process whose NCCL call hangs."""
STORE_EXCHANGE_POLL_S = 0.05
"""Seconds between two checks for what another member stores, by which a round is late."""
PRESENCE_S = 2.0
"""If listing the stored sums takes longer, the absent members of a round are not named."""
MAX_UNPACKED_GROUPS = 3
"""Tensors of older groups are unpacked again."""
SOLO_MEETING_S = 3600.0
"""A meeting with a single member fails after this long."""
MAX_CACHED_BYTES = 512 << 20
"""Older trajectories leave memory and are fetched again."""
