"""The protocol of the control plane between the ranks of one host."""

from collections.abc import Callable
from typing import Any, Protocol


class HostProcesses(Protocol):
    """The ranks of this host, which share memory, programs and bucket order."""

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        ...

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        ...

    def host_barrier(self) -> None:
        """Wait for all ranks of this host."""
        ...

    def bcast_from_host_leader(self, make: Callable[[], Any]) -> Any:
        """Give all ranks of this host the value that its first makes."""
        ...
