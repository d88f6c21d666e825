"""Decisions that ranks make together: votes, recoveries, fingerprints, budgets; and the syntax of faults."""

import functools
import re
import signal
import subprocess
import sys
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.checkpoint import manager, run_directory
from jaxmpi.checkpoint.held_folder import HeldFolder
from jaxmpi.checkpoint.manager import Retention
from jaxmpi.checkpoint.restore import restore
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import gather_workers, shard_rows
from jaxmpi.config import schema
from jaxmpi.core.errors import AgreedError, TrainingError, UsageError
from jaxmpi.core.train_state import create
from jaxmpi.recover import decisions, replica_check, signals
from jaxmpi.recover.decisions import NonFiniteStep, Recovery, RollBack, StepConsensus
from jaxmpi.runtime import failures, fault_injection
from jobs import start
from launching import ROOT


class Silent(signals.PreemptionNotice):
    """Hears no signals."""

    def __init__(self) -> None:
        self.is_given = self.is_interrupt = False


class Ranks(SoloProcesses):
    """The votes of several ranks, gathered in one process: what MPI's largest of integers gives."""

    def __init__(self) -> None:
        self.ballots = []

    def iallreduce_max(self, values):
        self.ballots.append(values)
        return lambda: functools.reduce(np.maximum, self.ballots)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({}, None),
        ({2: 0}, NonFiniteStep(7, 2, "loss")),
        ({1: 1, 3: 0}, NonFiniteStep(7, 1, "gradient of params/a")),
        ({5: 2}, NonFiniteStep(7, 5, "gradient of params/b")),
    ],
)
def test_all_ranks_come_to_the_lowest_worker_and_its_leaf(bad, expected):
    ranks = Ranks()
    votes = [StepConsensus(ranks, Silent(), ["params/a", "params/b"]) for _ in range(6)]
    for worker, vote in enumerate(votes):
        assert vote.cast(7, bad.get(worker), worker, True) is None
    assert [vote.count() for vote in votes] == [expected] * 6
    assert votes[0].count() is None


def test_an_infinite_sum_of_finite_updates_names_no_leaf():
    vote = StepConsensus(SoloProcesses(), Silent(), ["a"])
    vote.cast(3, None, 0, False)
    assert str(vote.count()) == "the sum of all gradients of worker 0 is not finite at step 3"


def test_a_signal_is_a_vote_of_all():
    before = signal.getsignal(signal.SIGUSR1)
    notice = signals.PreemptionNotice()
    try:
        vote = StepConsensus(SoloProcesses(), notice, [])
        signal.raise_signal(signal.SIGUSR1)
        vote.cast(1, None, 0, True)
        assert not vote.leaving  # not before all have voted
        vote.count()
        assert vote.leaving
    finally:
        notice.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_recoveries_are_limited():
    failure = NonFiniteStep(4, 1, "loss")
    with pytest.raises(AgreedError, match="the loss of worker 1 is not finite at step 4; mend it"):
        Recovery("stop", 9).decide(failure, "mend it")
    assert Recovery("skip", 1).decide(failure, "").endswith("at step 4: skipped")
    spent = Recovery("skip", 0)
    with pytest.raises(AgreedError, match="This is number 1, recover_limit is 0"):
        spent.decide(failure, "")
    recovery = Recovery("rollback", 3)
    for left_out in (set(), {4}):
        with pytest.raises(RollBack):
            recovery.decide(failure, "")
        assert recovery.left_out == left_out
    with pytest.raises(RollBack):
        recovery.decide_on_difference("params differ")
    with pytest.raises(AgreedError, match=r"params differ\. This is number 4"):
        recovery.decide_on_difference("params differ")
    with pytest.raises(AgreedError, match="params differ"):
        Recovery("skip", 3).decide_on_difference("params differ")


DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_)


@given(st.sampled_from(DTYPES), st.integers(0, 16), st.integers(0, 31), st.integers(0, 2**32 - 1))
def test_every_flipped_bit_changes_the_fingerprint(dtype, at, bit, seed):
    values = np.asarray(np.random.default_rng(seed).integers(0, 2, 17), dtype)
    changed = values.copy()
    if dtype == jnp.bool_:
        changed[at] ^= True
    else:
        changed.view(np.uint8).reshape(17, -1)[at, bit // 8 % values.itemsize] ^= 1 << bit % 8
    one, other = (np.asarray(replica_check.fingerprint(jnp.asarray(x))) for x in (values, changed))
    assert one != other
    assert replica_check.checksum(values) != replica_check.checksum(changed)


ROWS = {
    "equal": ([5, 5, 5], ""),
    "one": ([5, 6, 5], "after step 9: worker 1 differs from the other 2 in b$"),
    "two": ([5, 6, 5, 7, 5], r"worker \[1, 3\] differs from the other 3 in b$"),
    "tie": ([5, 6], r"workers \[0\] and \[1\] apart; which of them are right cannot be told"),
}


@pytest.mark.parametrize("case", ROWS)
def test_workers_whose_params_differ_are_named(case):
    values, message = ROWS[case]
    rows, mine = np.array([[3, value] for value in values], np.uint32), tuple(range(len(values)))
    text = replica_check.compare_replicas({"a": 0, "b": 0}, rows, mine, SoloProcesses(), 9)
    assert re.search(message or "^$", text), text


def test_a_flipped_bit_is_found_among_the_workers_of_one_process():
    workers = gather_workers(4)
    assert workers.mesh is not None
    tree = {"b": np.float32(1), "none": np.zeros((0, 2), np.float32), "w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    flipped = {**tree, "w": tree["w"].copy()}
    flipped["w"].view(np.uint32)[1, 2] ^= 1
    for third, expected in ((tree, ""), (flipped, "worker 2 differs from the other 3 in w")):
        params = shard_rows([tree, tree, third, tree], workers.mesh)
        by_device = np.asarray(jax.vmap(replica_check.fingerprints)(params))
        for hashes in (replica_check.checksums(params, workers), by_device):
            assert hashes.shape == (4, 3)
            text = replica_check.compare_replicas(params, hashes, workers.mine, workers.processes, 1)
            assert text.endswith(expected)
            assert bool(text) == bool(expected)


def test_the_budget_of_skipped_data():
    decisions.check_budget(10, 1000, 1, 0.01)
    decisions.check_budget(20, 1000, 2, 0.01)
    with pytest.raises(AgreedError, match=r"11 corrupt examples were skipped, data.max_skipped allows 10 by now"):
        decisions.check_budget(11, 1000, 1, 0.01)


# ---------------------------------------------------------------- saver


def test_errors_in_the_background_are_raised_by_the_next_call(tmp_path):
    state = create({"w": np.ones(3, np.float32)}, {}, {}, seed=0, worker=0)
    folder = tmp_path / "checkpoints"
    one = manager.Saver(HeldFolder(tmp_path), SoloProcesses(), workers=1, replicated=True, keep=Retention(2))
    one.save({0: state}, {}, None)
    one.wait()
    one.save(
        {0: state._replace(step=np.int32(1) * np.ones((), np.int32), params={"w": np.array([1, np.nan])})}, {}, None
    )
    with pytest.raises(TrainingError, match=r"params/w of common.bin is not finite after step 1: .*step_00000000"):
        one.wait()
    one.poll()  # said once
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("a file where a folder should be")
    one.save({0: state._replace(step=np.full((), 2, np.int32))}, {}, None)
    with pytest.raises(TrainingError, match=r"the checkpoint of step 2 cannot be written: .*last good checkpoint: "):
        one.wait()


@pytest.mark.parametrize(("is_last", "expected"), [(False, 1), (True, 0)])
def test_the_last_checkpoint_of_a_run_is_written_without_a_copy(is_last, expected, tmp_path):
    state = create({"w": np.ones((16, 125_000), np.float32)}, {}, {}, seed=0, worker=0)
    one = manager.Saver(HeldFolder(tmp_path), SoloProcesses(), workers=1, replicated=True, keep=Retention(1))
    tracemalloc.start()
    try:
        one.save({0: state}, {}, None, is_last=is_last)
        one.wait()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = state.params["w"].nbytes
    assert expected * size <= peak_bytes <= (expected + 0.5) * size  # isfinite of a leaf takes a quarter of it
    restored = restore(tmp_path / "checkpoints", {0: state}, SoloProcesses(), workers=1, replicated=True)
    assert restored is not None
    assert (restored.states[0].params["w"] == 1).all()


# ---------------------------------------------------------------- signals

HANGUP = """
import os, signal, sys
from jaxmpi.recover.signals import PreemptionNotice
notice = PreemptionNotice()
for _ in range(2):  # by the shell and by the kernel
    os.kill(os.getpid(), signal.SIGHUP)
print(notice.is_given)
"""


@pytest.mark.parametrize(("before", "expected"), [([], "True"), (["nohup"], "False")])
def test_a_hangup_is_one_request_to_leave_and_none_under_nohup(before, expected):
    line = [*before, sys.executable, "-c", HANGUP]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert (ended.stdout.strip(), ended.returncode) == (expected, 0), ended.stderr


# ---------------------------------------------------------------- syntax of faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil", "unknown fault 'kil'; did you mean 'kill'"),
        ("kill:ranks=1", "unknown key 'ranks'; did you mean 'rank'"),
        ("kill:rank=4", "rank: got 4; expected all, or"),
        ("kill:step=" + "9" * 5000, "step: got '9{60,}.*expected"),
        ("slow:seconds=nan", "seconds: got 'nan'; expected"),
        ("exit:hard=no", "hard: got 'no'; expected"),
    ],
)
def test_invalid_faults_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        fault_injection.parse(text, 4)


def test_a_fault_happens_as_often_as_asked_in_the_life_of_a_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_injection, "_faults", [])
    state = create({"w": jnp.ones(2)}, {}, {}, seed=0, worker=0)
    batch = {"weight": np.ones(3, np.float32)}
    is_infinite = []
    for _ in range(2):  # two starts
        fault_injection.request(["nan:step=2,times=2", "nan:rank=1"], 2, [0], tmp_path)
        for step in range(1, 4):
            _, got = fault_injection.inject_at("step", step, (state, batch))
            is_infinite.append(bool(np.isinf(got["weight"]).any()))
    assert is_infinite == [False, True, True, False, False, False]
    assert np.isfinite(batch["weight"]).all()


def test_a_fault_beyond_the_last_step_is_refused_and_one_that_did_not_happen_is_known(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="step: got 301; no worker comes beyond step 300"):
        fault_injection.parse("nan:step=301", 4, last_step=300)
    assert fault_injection.parse("nan:step=300", 4, last_step=300).step == 300
    monkeypatch.setattr(fault_injection, "_faults", [])
    orders = (["slow:step=2,seconds=0", "slow:step=4,seconds=0", "slow:step=1,seconds=0,times=0"], 2, [0], tmp_path)
    fault_injection.request(*orders)
    for step in range(1, 4):
        fault_injection.inject_at("step", step)
    assert fault_injection.missed() == ["slow:step=4,seconds=0"]
    fault_injection.request(*orders)  # another start remembers
    assert fault_injection.missed() == ["slow:step=4,seconds=0", "slow:step=1,seconds=0,times=0"]


def test_one_bit_flips(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_injection, "_faults", [])
    fault_injection.request(["bitflip:leaf=b,bit=31"], 1, [0], tmp_path)
    state = create({"a": jnp.ones(2), "b": jnp.ones((2, 2))}, {}, {}, seed=0, worker=0)
    changed, _ = fault_injection.inject_at("step", 1, (state, {}))
    assert changed.params["b"].tolist() == [[-1, 1], [1, 1]]
    assert changed.params["a"].tolist() == [1, 1]


# ---------------------------------------------------------------- another number of workers


Stored = functools.partial(run_directory.StoredSettings, exchange={})


@pytest.mark.parametrize(
    ("fields", "stored", "workers", "expected"),
    [
        ({"local_batch": 8}, Stored(4, 4, 32), 4, (8, 0)),
        ({"local_batch": 8}, Stored(4, 4, 32), 3, (0, 32)),
        ({"local_batch": 8}, Stored(3, 4, 32), 3, (0, 32)),
        ({"effective_batch": 32}, Stored(3, 4, 32), 3, (0, 32)),
        ({"effective_batch": 32}, Stored(3, 4, 32), 4, (0, 32)),
        ({}, None, 3, (0, 0)),
    ],
)
def test_the_effective_batch_is_kept_on_resume(fields, stored, workers, expected):
    got = run_directory.keep_batch_and_groups(schema.Experiment(**fields), stored, workers)
    assert (got.local_batch, got.effective_batch) == expected


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("is_repeated", "code", "message"), [(False, 130, "interrupted: saved at step"), (True, 130, "leave: not saved")]
)
def test_ctrl_c_saves_one_worker_and_a_second_one_leaves_at_once(is_repeated, code, message, tmp_path):
    line = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "--log-every", "1", "experiments/digits.py"]
    line += ["--run-dir", str(tmp_path / "run"), "--inject", "slow:times=0,seconds=0.3"]
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    job = start([sys.executable, "-c", heard, *line])  # a shell's background job has Ctrl-C ignored
    for pattern in ("at step 3$", "^jaxmpi: interrupted:")[: 1 + is_repeated]:
        job.when(pattern)
        time.sleep(2 * failures.ONE_CTRL_C_S)
        job.signal(signal.SIGINT)
    assert job.end() == code, job.out
    assert message in job.out
    assert any((tmp_path / "run").glob("checkpoints/*")) != is_repeated
    assert "Traceback" not in job.out
