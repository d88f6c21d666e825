"""What all ranks decide together while a run goes on: to leave, to stop, to skip a step, to go back."""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import runtime
from jaxmpi.config import AgreedError
from jaxmpi.processes import Processes, named_leaves

PyTree = Any
LOSS = 0  # in a ballot: not a leaf of the gradients but the loss; leaf i is i + 1


class RollBack(Exception):
    """Go back to the newest checkpoint: `step` failed, or 0 where no step is to blame."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


class Preempted(Exception):
    """The run has saved itself on request and can be resumed."""


# ---------------------------------------------------------------- signals


class Notice:
    """Whether this process has been asked to leave, by SIGTERM or SIGUSR1."""

    def __init__(self) -> None:
        """Signals keep their meaning where Python cannot take them, which is outside the main thread."""
        self.given = False
        try:
            self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGUSR1)}
        except ValueError:
            self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.given:  # asked twice: at once
            sys.stderr.write(f"jaxmpi: {runtime.who()}: asked twice to leave: not saved\n")
            runtime.end_job(runtime.PREEMPTED)
        self.given = True

    def close(self) -> None:
        """Give signals their meaning of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- votes


class Failure(NamedTuple):
    """A step that is not finite, as all ranks know it."""

    step: int
    rank: int  # the lowest that has it
    what: str  # loss, or the path of a gradient

    def __str__(self) -> str:
        return f"the {self.what} of worker {self.rank} is not finite at step {self.step}"


class Votes:
    """One vote a step, counted while the next step runs: the device waits for neither.

    Communicates: the largest of three integers over all ranks, once a step.
    """

    def __init__(self, processes: Processes, notice: Notice, leaves: list[str]) -> None:
        """Args: `leaves`, the paths of the params."""
        self._processes, self._notice, self._leaves = processes, notice, leaves
        self._open: tuple[int, Callable[[], np.ndarray]] | None = None
        self.leaving = False  # the same on all ranks

    def cast(self, step: int, bad: int | None, worker: int, applied: bool) -> Failure | None:
        """Vote on a step; what came of the vote before.

        Args:
            bad: what of this process is not finite: LOSS, a leaf + 1, or None.
            worker: of which of its workers.
            applied: whether the update was made.
        """
        before = self.count()
        ballot = 0 if bad is None else (1 << 62) - (worker << 32) - bad  # the largest is the lowest worker's
        if bad is None and not applied:
            ballot = 1
        self._open = step, self._processes.most(np.array([self._notice.given, ballot]))
        return before

    def count(self) -> Failure | None:
        """What came of the open vote, if there is one."""
        if self._open is None:
            return None
        (step, result), self._open = self._open, None
        leaving, ballot = result().tolist()
        self.leaving = self.leaving or bool(leaving)
        if ballot == 0:
            return None
        if ballot == 1:
            return Failure(step, 0, "sum of all gradients")
        worker, bad = divmod((1 << 62) - ballot, 1 << 32)
        return Failure(step, worker, "loss" if bad == LOSS else f"gradient of {self._leaves[bad - 1]}")


class Recovery:
    """What becomes of failures, the same on all ranks; counted over a run."""

    def __init__(self, policy: str, limit: int) -> None:
        """Args: a name of config.RECOVERIES, and how often it may be made use of."""
        self.policy, self.limit = policy, limit
        self.count = 0
        self.failed: set[int] = set()  # steps that failed once
        self.left_out: set[int] = set()  # steps that failed twice

    def of(self, failure: Failure, tail: str) -> str:
        """A line that says what is done about a failed step.

        Args:
            tail: of the error, with what the user can do.

        Raises:
            AgreedError: the run stops.
            RollBack: the run goes back.
        """
        self._spend(f"{failure}; {tail}")
        if self.policy == "skip":
            return f"{failure}: skipped"
        (self.left_out if failure.step in self.failed else self.failed).add(failure.step)
        raise RollBack(failure.step, str(failure))

    def of_difference(self, text: str) -> None:
        """What is done about workers whose params differ.

        Raises:
            AgreedError: the run stops.
            RollBack: the run goes back.
        """
        if self.policy != "rollback":
            raise AgreedError(text)
        self._spend(text)
        raise RollBack(0, text)

    def _spend(self, text: str) -> None:
        if self.policy == "stop":
            raise AgreedError(text)
        self.count += 1
        if self.count > self.limit:
            raise AgreedError(f"{text}. This is number {self.count}, recover_limit is {self.limit}")


# ---------------------------------------------------------------- replicas


def fingerprints(tree: PyTree) -> jax.Array:
    """u32[leaves]: a sum over the bits of each leaf, every word times an odd number of its own.

    h = sum_i (2 i + 1) word_i  mod 2^32 ; a flipped bit of one word changes it by +-2^b (2 i + 1), which is not 0.
    """
    return jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)] or [jnp.zeros((), jnp.uint32)])


def fingerprint(leaf: jax.Array) -> jax.Array:
    """u32[] of one leaf."""
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, words).reshape(-1).astype(jnp.uint32)
    odd = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return (bits * odd).sum(dtype=jnp.uint32)


def difference(rows: Mapping[int, np.ndarray], leaves: list[str], step: int) -> str:
    """Which workers differ from most of the others, and where; empty where all are equal.

    Args:
        rows: fingerprints by worker.
        leaves: their paths.
    """
    votes = Counter(row.tobytes() for row in rows.values())
    if len(votes) == 1:
        return ""
    (most, count), *others = votes.most_common()
    text = f"params of workers differ after step {step}: "
    if count == others[0][1]:
        groups = [[worker for worker, row in rows.items() if row.tobytes() == key] for key in votes]
        return text + f"workers {' and '.join(map(str, groups))} apart; which of them are right cannot be told"
    odd = [worker for worker, row in rows.items() if row.tobytes() != most]
    wrong = rows[odd[0]] != np.frombuffer(most, np.uint32)
    paths = ", ".join(leaves[i] for i in np.flatnonzero(wrong)[:4])
    return text + f"worker {odd if len(odd) > 1 else odd[0]} differs from the other {count} in {paths}"


def compare_replicas(tree: PyTree, found: np.ndarray, mine: tuple[int, ...], processes: Processes, step: int) -> str:
    """`difference` between all workers of the job, on all ranks alike.

    Args:
        tree: of which `found`, u32[workers of this process, leaves], are the fingerprints.

    Communicates: a gather of the fingerprints as text.
    """
    texts = processes.gather(found.astype("<u4").tobytes().hex())
    every = np.frombuffer(bytes.fromhex("".join(texts)), "<u4").reshape(len(texts) * len(mine), -1)
    return difference(dict(enumerate(every)), [name for name, _ in named_leaves(tree)], step)


def check_budget(skipped: int, examples: int, epochs_begun: int, share: float) -> None:
    """Stop where more of the data is skipped than `data.max_skipped` allows.

    Raises:
        AgreedError: examples skipped and allowed.
    """
    allowed = share * examples * epochs_begun
    if skipped > allowed:
        raise AgreedError(
            f"{skipped} corrupt examples were skipped, data.max_skipped allows {allowed:.0f} by now ({share:g} of "
            f"{examples} examples an epoch); mend the data, or allow more"
        )
