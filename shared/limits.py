"""Timeouts, attempts and sizes of the shared modules, each with what happens beyond it."""

from datetime import timedelta

MAX_MESSAGE_BYTES = 64 * 1024
"""A larger message is refused by its sender."""
MAX_UNCOMPRESSED_BYTES = 16 * 1024
"""A larger message is compressed."""
MAX_PLAIN_BYTES = 2 * 1024 * 1024
"""A message that is larger after decompression is refused, so that it cannot fill the memory."""
MAX_MESSAGE_DEPTH = 16
"""A message with more lists or tables within one another is refused unread."""
MAX_TEXT = 4096
"""A longer text, such as a prompt, is refused."""
MAX_METADATA = 16 * 1024
"""A prompt whose metadata (names, texts, JSON of lists and tables) has more bytes is refused."""
MAX_METADATA_DEPTH = 32
"""Metadata with more lists or tables within one another are refused."""
MAX_GROUP_SIZE = 1024
"""A recipe with more samples in a group is refused: one message names all of them."""
MAX_FRAGMENTS_PER_GROUP = 64
"""A recipe whose groups have more fragments is refused."""
MAX_SCORERS = 32
"""A recipe with more scorers is refused."""
MAX_SCORE = 1e6
"""A score beyond it, in either direction, is refused."""
MAX_PIECES = 16 * 1024
"""A batch with more pieces is refused: one message names all of them (`MAX_SUMS_BYTES`)."""
MAX_MEMBERS = 4096
"""A recipe with more members is refused: one message names all of them."""
MAX_SUMS_BYTES = 240 * 1024
"""A larger `ExchangeSums` is refused by its sender: the broker takes no message over 256 KB."""
SAME_NAME_S = 120.0
"""A message with the name of one that is older than this is stored again."""
MAX_SHORTAGE_TEXT = 1000
"""Characters of each part of a report of too little memory; the rest is cut."""
PUBLISH_TIMEOUT_S = 5.0
"""A message that the broker has not stored after this long counts as not sent, and is repeated."""
FLUSH_TIMEOUT_S = 3
"""A connection that has not sent its last bytes this long after its end loses them."""
MAX_HANDLING_S = 0.05
"""CPU seconds of handling messages that are not stored after which other tasks have a turn."""
BROKER_CONNECT_S = 30.0
"""A broker that has not answered for this long at the start ends the process."""
ERROR_REPEAT_S = 30.0
"""An error of the connection that lasts is logged again after this long."""
MAX_KEPT_MARKS = 64
"""Older marks of a stream are deleted: the commands before them left with their batch."""
ACK_WAIT_S = 4.0
"""Work without a progress report for this long is delivered again, before its lease ends."""
MAX_DELIVERIES = 5
"""Work that has been delivered this often is not delivered again."""
FETCH_TIMEOUT_S = 2.0
"""An idle worker asks its queue again after this long."""
QUEUE_RETRY_S = 0.5
"""Seconds between two attempts at a queue whose broker does not respond."""
HEARTBEAT_S = 1.0
"""A reader that has heard nothing for three times this long opens its subscription again."""
STREAM_INFO_TIMEOUT_S = 5.0
"""A broker that is silent about its streams for this long counts as not responding."""
MAX_HEADERS_BYTES = 4096
"""A message with larger headers may not fit its stream."""
MAX_CONSUMERS = 64 * 1024
"""Further readers of a stream are refused; without it, NATS 2.15 refuses more than 1,000."""
MAX_KEPT_SPANS = 10_000
"""A span whose parent is older than this many pieces of work has no parent."""
STORE_CONNECT_TIMEOUT = timedelta(seconds=10)
"""A connection to a bucket that takes longer has failed, and is retried."""
MAX_SILENCE = timedelta(seconds=60)
"""A request fails after this silence: between two parts of an answer, or while a body is sent."""
MAX_RETRY_TIME = timedelta(seconds=60)
"""No further attempt at a request begins after this long: the store counts as unavailable."""
MAX_PART_SILENCE = timedelta(seconds=960)
"""A request with a part of an object fails after this silence, however slow the line is."""
MAX_PART_RETRY_TIME = timedelta(seconds=300)
"""A part is not sent again after this long; a slow line may starve a connection for a minute."""
MAX_RETRY_PAUSE = timedelta(seconds=1)
"""Pauses between attempts grow no longer, so that a service that is back is noticed."""
MAX_STORE_ATTEMPTS = 600
"""More attempts than `MAX_RETRY_TIME` has time for, which therefore decides alone."""
MAX_REQUEST_TIME = timedelta(days=365)
"""A request that takes longer fails, even while bytes arrive."""
MAX_STREAM_DELAY_S = 0.1
"""Bytes of a stream are passed on after this long, even if they are few."""
OTHER_BOOT_AGE_S = 86_400.0
"""An older folder of another boot is deleted; a younger one may be of another host of the home."""
LOCK_POLL_S = 0.02
"""Seconds between two checks of an object that another process fetches, by which it is late."""
MIN_WAITS_PER_POLL = 30
"""A wait of this many intervals makes them longer: a thirtieth of a wait may be lost."""
MAX_PEERS = 3
"""After this many hosts without an object, it is read from the store."""
MAX_FETCHES = 3
"""An object that others have removed this often is not fetched again: the read fails."""
MAX_HEADER_BYTES = 4 * 1024 * 1024
"""An object with a larger header is no tensor file."""
MAX_TENSORS = 4096
"""An object with more tensors is refused."""
MAX_DIMENSIONS = 8
"""A tensor with more dimensions is refused."""
MAX_RECENT_STEPS = 256
"""Older steps leave memory, and are read from the store again."""
MAX_CONCURRENT_READS = 16
"""Further records wait: the store answers this many reads at a time."""
FIRST_ENTRIES = 16
"""A new reader of a log passes fewer adjacent entries that were moved away than it reads first."""
MAX_CONCURRENT_ENTRIES = 64
"""Further entries of a log wait: this many are read at a time."""
DIGEST_POLL_S = 0.5
"""Seconds between two checks for a digest that another role stores, by which it is late."""
SAFE_AGE_S = 24 * 3600.0
"""An older object that no record names is deleted: a longer write would lose it."""
MAX_MANIFEST_BYTES = 64 << 20
"""A larger manifest of shards is refused unread."""
MAX_SHARDS = 4096
"""A version with more shards is refused."""
MAX_TENSOR_PIECES = 512
"""A tensor in more pieces, one for each rank, is refused."""
MAX_TENSOR_NAME = 512
"""A tensor with a longer name is refused."""
MAX_RECORD_BYTES = 1 << 28
"""A backup that is larger after decompression is refused."""
RECIPE_POLL_S = 0.5
"""Seconds between two checks for the run's recipe, by which a process starts late."""
RECIPE_WAIT_LOG_S = 30.0
"""A process that waits for the run's recipe logs this again after this long."""
MAX_CACHED_IMAGES = 64
"""Older source images leave memory, and are read again."""
MAX_CHANGES = 1000
"""Further changes of a device in a batch are not shown."""
MAX_TIMELINE_BYTES = 64 << 20
"""A stored timeline that is larger after decompression is refused."""
MAX_INDEXED_VERSIONS = 256
"""Older versions leave the index, and are found by the commit records alone."""
MAX_BASES = 8
"""A recipe with more bases one upon another is refused: it may be a ring."""
MAX_LOST_CALLS = 3
"""After this many calls that hang or end their process, a fragment's other samples fail untried."""
MAX_PICTURE_BYTES = 32 << 20
"""A larger source image is refused."""
MAX_CONFIG_BYTES = 64 << 20
"""A larger file without weights is not fetched from the hub."""
MAX_FILE_HEADER_BYTES = 64 * 1024 * 1024
"""A file of weights with a larger header is refused."""
STATUS_S = 1.0
"""Seconds between two statuses; five without one, and the worker has left."""
WORKER_RETRY_S = 0.5
"""Seconds between two attempts of a worker whose broker or store does not respond."""
COMMIT_POLL_S = 1.0
"""Seconds between two checks for a commit that was announced, by which its end is noticed late."""
HANG_CHECK_S = 1.0
"""Seconds between two checks of a process's work, by which one that hangs ends late."""
DEADLINE_FACTOR = 10
"""Work that takes more than this factor over its usual time is taken away, or its process ended."""
MIN_DEADLINE_S = 120.0
"""No work is given up earlier: a store may be slow, and a first call may compile."""
FIRST_DEADLINE_S = 1800.0
"""Work of a kind that was never finished is given up after this long."""
OUTAGE_GRACE_S = 90.0
"""This long after an outage was noticed, work counts again: its next attempt may take as long."""
REQUEST_GRACE_S = 10
"""A request that runs this long after a stop signal is cut off."""
EXIT_TIMEOUT_S = 18.0
"""A process that has not ended this long after a stop signal ends, although threads still run."""
MAX_THREADS = 64
"""Further blocking calls of a service wait for a thread."""
MAX_WAITING_CONNECTIONS = 2048
"""Further connections to a service are refused by the system."""
MAX_CLEANUP_S = 6.0
"""A task that still runs this long after its cancellation is cancelled again."""
STORE_CHECK_TIMEOUT_S = 10.0
"""A bucket that does not answer a request without a name in this time is unavailable."""
SIGN_IN_CODE_S = 600.0
"""A link to a page is invalid after this long."""
SESSION_S = 12 * 3600.0
"""A browser has to sign in again after this long."""
MAX_SESSIONS = 256
"""One more code, or session, of a caller ends the caller's oldest."""
REQUEST_TIMEOUT_S = 15.0
"""A client that has not sent its request in this time is disconnected."""
COLLECTOR_TIMEOUT_S = 2.0
"""Spans that a collector has not accepted in this time are lost; no work waits for it."""
COLLECTOR_FLUSH_S = 1.0
"""Spans that are not sent this long after the end are lost."""
EXPORT_INTERVAL_S = 1.0
"""Seconds between two exports of spans, by which a trace is late."""
MAX_WAITING_SPANS = 8192
"""While more spans wait for the collector, the newest are lost."""
CONDITIONS_POLL_S = 0.25
"""Seconds between two checks for conditions that are not stored, by which a fragment is late."""
MAX_CACHED_PROMPTS = 8
"""Conditions of older prompts leave memory, and are read again."""
MAX_STORED_CONDITIONS = 64
"""Conditions of older prompts are stored again."""
MAX_DEVICE_PROMPTS = 64
"""Conditions of older prompts leave the device, and are encoded or read again."""
MAX_CONDITIONS = 64
"""Conditions of more tensors are refused."""
MAX_LATENT = 1e4
"""A trajectory with a larger latent is refused: the network has diverged."""
MAX_LATENT_RMS = 1e3
"""Latents of a larger root mean square are refused; latents of working networks have some tens."""
MAX_LOG_PROB = 1e6
"""A trajectory with a larger log-prob, a mean over elements, is refused."""
MAX_CONCURRENT_COPIES = 8
"""Further objects of a run that is copied wait; each of these is in memory."""
MAX_COPY_ATTEMPTS = 8
"""A run that so often deletes its newest version before it is copied is not copied."""
