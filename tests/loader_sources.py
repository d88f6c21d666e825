"""Sources for loader processes, in a module that such a process can import."""

import os
import signal
import time
from collections.abc import Collection

import numpy as np

from jaxmpi.data import CorruptExample

PX = 6


class Numbered:
    """Example i is all i, labelled i; of some, something is wrong."""

    name, classes = "numbered", 0

    def __init__(
        self,
        n: int,
        bad: Collection[int] = (),
        error: type[Exception] | None = None,
        sleep_s: float = 0,
        ends_at: int | None = None,
        by: str = "SIGKILL",
    ):
        self.n, self.bad, self.error, self.sleep_s = n, bad, error, sleep_s
        self.ends_at, self.by = ends_at, by
        self.encoded, self.in_process = None, False

    def __len__(self) -> int:
        return self.n

    def where(self, index: int) -> str:
        return f"file{index}.jpg"

    def __getitem__(self, index: int):
        if index in self.bad:
            if self.error is not None:
                raise self.error("by the user")
            raise CorruptExample(self.where(index), index, "truncated")
        if index == self.ends_at:
            os.kill(os.getpid(), signal.Signals[self.by])
        time.sleep(self.sleep_s)
        return np.full((PX, PX, 3), index, np.uint8), index


class Unpicklable(Numbered):
    def __getstate__(self):
        raise TypeError("holds a socket")


class TwoArguments(Exception):
    """An error that pickle takes apart and cannot put together."""

    def __init__(self, one: str, two: str = ""):
        super().__init__(one)
        if not two:
            self.args = (one, two, "three")
