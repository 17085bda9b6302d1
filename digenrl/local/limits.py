"""Timeouts, attempts and sizes of local runs, each with what happens beyond it."""

MAX_JETSTREAM_BYTES = 1 << 30
"""A full JetStream blocks its publishers, and an alarm fires."""
PROBE_TIMEOUT_S = 2
"""A broker that does not answer a probe in this time is not ready yet."""
PROGRESS_POLL_S = 2.0
"""Seconds between two checks of a run's progress, by which `digenrl status` is late."""
SOCKET_BIND_S = 60
"""An older socket on which no process listens is deleted; a younger one may still be opened."""
VACUUM_S = 60
"""Seconds until the space of deleted objects is free; with more, `digenrl up` needs more disk."""
VACUUM_PAUSE_S = 40
"""Seconds between two vacuums; a longer pause misses `VACUUM_S` on a busy machine."""
MAX_GARBAGE = 0.3
"""A vacuum rewrites a volume of which a larger share is deleted."""
MIN_DISK_BYTES = 2 << 30
"""With less free space the folder of runs is reported as full."""
MIN_MEMORY_BYTES = 2 << 30
"""With less free memory a warning is given."""
MIN_OPEN_FILES = 1024
"""With fewer open files brokers and object store fail under load; the fault names the remedy."""
MAX_SKEW_S = 5.0
"""Clocks that differ more are reported: stores refuse requests, and logs cannot be compared."""
SERVICE_TIMEOUT_S = 5.0
"""A service that does not answer in this time is reported as a fault."""
GPU_TRIAL_TIMEOUT_S = 120.0
"""A GPU that is not tried within this time is reported as a fault."""
MAX_STORED_PER_S = 200 << 20
"""Bytes that a run stores in a second at most, as far as disk space is planned for it."""
MIN_FREE_BYTES = 1 << 30
"""With less free space besides weights and checkpoints, no run starts."""
PAGE_ANSWER_S = 2.0
"""If the process of the page does not answer in this time, the scheduler answers instead."""
MAX_READ_VERSIONS = 50
"""Older versions are not read for a status."""
MAX_LOG_TAIL_BYTES = 1 << 16
"""A reason that is further from the end of a child's log is not found."""
NVIDIA_SMI_TIMEOUT_S = 30
"""If nvidia-smi takes longer, the GPUs have to be named, and no card's kind is known."""
READY_S = 60.0
"""A program that is not ready after this long has failed."""
READY_TIMEOUT_S = 5
"""A probe of a program that takes longer is repeated."""
READY_POLL_S = 0.1
"""Seconds between two probes of a program, by which a start is late."""
RANKS_STOP_S = 15
"""Ranks that have not ended this long after a signal are killed."""
FORK_TIMEOUT_S = 120.0
"""After this long without a forked process the starter is given up; a disk may be slow."""
CHILD_STOP_S = 20.0
"""A child that has not ended this long after a signal is killed."""
BROKER_STOP_S = 0.5
"""A broker that has not ended after this long is killed: acknowledged data are on the disk."""
FIRST_BACKOFF_S = 0.2
"""Seconds before a child starts again; each further wait is twice as long."""
MAX_BACKOFF_S = 10.0
"""Waits between starts of a child grow no longer."""
STABLE_S = 30.0
"""A child that lived this long counts as useful, even if it has reported no work."""
MAX_DEATHS = 8
"""A child that dies more often in a row, without work in between, is given up."""
MIN_RESTART_BYTES = 64 << 20
"""With less free space NATS is not started again: its disk would be full at once."""
RESTART_DELAY_S = 30.0
"""NATS is not started again earlier after a start."""
DETACH_POLL_S = 0.2
"""Seconds between two checks of a run in the background, by which `--detach` returns late."""
EVALUATION_POLL_S = 0.5
"""Seconds between two checks of the last evaluation, by which a run ends late."""
EVALUATOR_TIMEOUT_S = 2.0
"""An evaluator that takes longer to answer is called again later: the display does not stall."""
PAGE_LINK_TIMEOUT_S = 2.0
"""If the page of a run in progress takes longer to give a link, another page is served."""
MAX_CERTIFICATE_DAYS = 825
"""Browsers refuse a server's certificate that lives longer."""
WATCH_POLL_S = 0.5
"""Seconds between two checks of a run, by which the display is late."""
API_TIMEOUT_S = 10
"""A request to the scheduler that takes longer is given up, and repeated later."""
LINK_POLL_S = 0.1
"""Seconds between two requests for the link to the page, which is late by it."""
PAGE_TIMEOUT_S = 30.0
"""If the page has no link after this long, none is printed."""
FAREWELL_S = 5.0
"""The first host's brokers end this long after its workers: others learn the run's end before."""
HOST_READY_S = 10.0
"""A host marks this often that all its workers are ready; probes allow a minute."""
MAX_LOG_BYTES = 64 << 20
"""`digenrl host`, which prints the logs of its processes, keeps only the newest of more bytes."""
HOST_RETRY_S = 5.0
"""Seconds between two attempts of a host at brokers that do not respond."""
MAX_OPEN_RUNS = 6
"""Open runs of the page of all runs: a further one closes the run used longest ago."""
OPEN_RUN_IDLE_S = 60.0
"""The page closes a run without readers after this long: other commands may resume it."""
STORED_RUNS_S = 30.0
"""Seconds between two lists of the runs of a store, for the page of all runs."""
PAGE_NICENESS = 10
"""CPU niceness of the page and its commands: a run on the same host has precedence. With 19, an
export took 88 s instead of 6 while three other processes were busy."""
COPY_PROGRESS_S = 5.0
"""Seconds between two lines about the progress of `digenrl copy`."""
