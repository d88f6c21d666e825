"""Settings of the exchange: strategy, buckets, overlap."""

from dataclasses import dataclass
from typing import Literal

from jaxmpi.config.validate import check_fields
from jaxmpi.core.errors import UsageError


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Raise `UsageError` unless it is None or can hold a float."""
    if not (bucket_bytes is None or (hasattr(bucket_bytes, "__index__") and bucket_bytes >= 4)):
        raise UsageError(
            f"bucket_bytes: got {bucket_bytes!r}; expected None (one flat buffer) or a whole number of bytes >= 4"
        )


@dataclass(frozen=True)
class ExchangeConfig:
    """How workers exchange, and how many bits travel."""

    strategy: str = "auto"  # algorithm[:wire] or an alias, as asa16, ring32, shm; lowrank4/ring16 compresses
    bucket_bytes: int | None = 4 << 20  # bytes up to which small leaves are fused; None = one flat buffer
    # exchange during the backward pass; auto: if it pays, between hosts, or if workers then hold less of gradients
    overlap: Literal["auto", "on", "off"] = "auto"
    # each worker updates a shard of the params, with that shard of the optimizer's state, between the two halves of the
    # exchange
    shard_update: Literal["off", "on"] = "off"
    # wire of new params under shard_update; with a coarser one than 32 their changes travel, by 32-bit masters
    gather_wire: str = "32"

    def __post_init__(self) -> None:
        check_fields(self, "exchange.")
        check_bucket_bytes(self.bucket_bytes)
        if self.gather_wire != "32" and self.shard_update != "on":
            raise UsageError(
                f"exchange.gather_wire: got {self.gather_wire} with shard_update {self.shard_update}, which gathers no "
                "params; add shard_update on, or leave it out"
            )
