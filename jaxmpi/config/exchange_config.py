"""Settings of the exchange: strategy, buckets, overlap."""

from dataclasses import dataclass
from typing import Annotated

from jaxmpi.config.choices import Choices, check_choices, use_python_numbers
from jaxmpi.config.refusals import incompatible, refuse_incompatible
from jaxmpi.core.errors import check


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Raise `UsageError` unless it is None or can hold a float."""
    check(
        bucket_bytes is None or (hasattr(bucket_bytes, "__index__") and bucket_bytes >= 4),
        f"bucket_bytes: got {bucket_bytes!r}; expected None (one flat buffer) or a whole number of bytes >= 4",
    )


# When buckets travel.
OVERLAPS = {
    "auto": "on if it pays, which is between hosts, or if workers then hold less of gradients",
    "on": "while the backward pass goes on",
    "off": "after it",
}


# Which part of the params each worker updates.
SHARD_UPDATES = {
    "off": "all of them, with all of the optimizer's state",
    "on": "a slice, with that slice of the optimizer's state: between the two halves of the exchange",
    "auto": "a slice where that can be and saves memory, else all of them; the run says which, and why",
}


ADD_SHARDS = "add shard_update on, or leave it out"
REFUSALS = (
    *incompatible(
        lambda x: x.shard_update != "on",
        "shard_update {shard_update}, which gathers no params",
        ("exchange.gather_wire", "below 32", ADD_SHARDS, "32".__ne__),
    ),
)


@dataclass(frozen=True)
class ExchangeConfig:
    """How workers exchange, and how many bits travel."""

    strategy: str = "auto"  # algorithm[:wire] or an alias, as asa16, ring32, shm; lowrank4/ring16 compresses
    bucket_bytes: int | None = 4 << 20  # bytes up to which small leaves are fused; None = one flat buffer
    # exchange concurrently with the backward pass
    overlap: Annotated[str, Choices(*OVERLAPS)] = "auto"
    # each worker updates a slice of the params and holds that slice of the optimizer's state
    shard_update: Annotated[str, Choices(*SHARD_UPDATES)] = "off"
    # wire of new params under shard_update; with a coarser one than 32 their changes travel, by 32-bit masters
    gather_wire: str = "32"

    def __post_init__(self) -> None:
        use_python_numbers(self)
        check_bucket_bytes(self.bucket_bytes)
        check_choices(self, "exchange.")
        refuse_incompatible(REFUSALS, self, "exchange.")
