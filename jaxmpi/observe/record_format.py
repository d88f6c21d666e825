"""Words of the record: kinds of lines, parts of a step's time.

The recorder and the reader share them. This module imports no JAX, so that `jaxmpi report` starts at once.
"""

FORMAT = 2  # version of the record; 1 had no anatomy
KINDS = (  # kinds of lines that jaxmpi writes
    *("run", "train", "workers", "eval", "exchange", "checkpoint", "skipped", "rollback", "stopped"),
    *("lost", "changed", "memory", "shuffle", "sample"),
)
# Parts of a step's time; all but `hidden` add up to it.
PARTS = {
    "data": "the device is idle for want of a batch",
    "transfer": "idle while a batch is handed to it; on CPUs it has nowhere to go",
    "compute": "forward, backward, update; and the exchange, if nothing tells it apart",
    "exchange": "waits for an exchange, as long as the last rank to enter it waits",
    "hidden": "an exchange overlaps the computation",
    "sync": "waits for ranks that enter the exchange later",
    "other": "the loop's own: logging, and compilation of the first step",
}
SOURCES = ("none", "unknown", "measured")  # of the time of an exchange, from the least to the most certain
EXCHANGE_PARTS = ("exchange", "hidden", "sync")  # parts that are unknown if their source is "unknown"
SAMPLES = "samples"  # folder of a run directory with pictures that a callback shows
