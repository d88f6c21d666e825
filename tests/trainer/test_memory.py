"""Memory of a worker before its first step: real bytes, whether they fit, and when updates are sharded."""

import dataclasses
import re
import sys
from pathlib import Path

import optax.contrib
import pytest

from jaxmpi.allreduce.buckets import Order
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim
from jaxmpi.core.errors import UsageError
from jaxmpi.experiments.digits import experiment as DIGITS
from jaxmpi.tools import cli
from jaxmpi.trainer import build, memory
from jaxmpi.trainer.memory import WorkerMemory, check_fits, estimate_memory
from jaxmpi.trainer.plan import Plan, make_plan
from launching import run, train_here
from runs import TINY

MB = 1_000_000
SYSTEM = {"JAXMPI_ALLOCATOR": "system", "JAX_PLATFORMS": "cpu"}

# ---------------------------------------------------------------- real bytes

WIDE = """
import ctypes, dataclasses, json, re
from pathlib import Path
from typing import Any
import jax, jax.numpy as jnp, numpy as np, optax
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers, put
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim
from jaxmpi.experiments.digits import experiment
from jaxmpi.model.contract import Model
from jaxmpi.trainer import build, memory, step
from jaxmpi.trainer.plan import make_plan
from jaxmpi.trainer.state import initial_states

WIDTH = 160_000  # arrays above 32 MB are mapped and unmapped, one by one


def init(key, image):
    return {"in": jnp.full((64, WIDTH), 0.01), "out": jnp.full((WIDTH, 10), 0.01)}, {}


def apply(params, model_state, image, key, train):
    return jnp.tanh(image.reshape(-1, 64) @ params["in"]) @ params["out"], model_state


def bytes_of(field):
    return int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10


def now():
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, is from here on
    return bytes_of("VmRSS")


model = Model("wide", init, apply, (8, 8, 1), 10)
data = dataclasses.replace(experiment.data, loader="threads")
asked = dataclasses.replace(experiment, model=model, optim=Optim("adam"), data=data, effective_batch=256)
"""

REAL = """
workers = Workers(SoloComm(), SoloProcesses(), (0,), None)
plan = make_plan(asked, workers)
gradients = jax.jit(step.local_gradients(build.forward_of(plan)))
batch = {"image": np.zeros((256, 8, 8, 1), np.uint8), "label": np.zeros(256, np.int32), "weight": np.ones(256, "f4")}
batch = jax.block_until_ready(jax.device_put(batch))
said = memory.forecast(plan, batch)
seen, start = {}, now()
params = jax.block_until_ready(init(None, None)[0])
seen["params"] = now() - start
start = now()
moments = jax.block_until_ready(optax.adam(1e-3).init(params))
seen["moments"] = now() - start
args = params, {}, batch, np.zeros(2, np.uint32), np.int32(0)
program = gradients.lower(*args).compile()
start = now()
jax.block_until_ready(program(*args))
seen["step"] = bytes_of("VmHWM") - start
functions = build.build_functions(plan)
state = put(initial_states(plan, functions.rule), workers)
functions.compile_step(state, batch)
start = now()
jax.block_until_ready(functions.train_step(state, batch))
seen["whole step"] = bytes_of("VmHWM") - start
del state
words = {"params": said.params + said.params_of_host, "moments": said.optimizer_state, "whole step": said.activations}
words["step"] = said.gradients + said.activations  # in the whole, gradients come where activations were
print("SEEN " + json.dumps([[name, words[name], seen[name]] for name in seen]))
"""


@pytest.mark.e2e
def test_a_worker_s_process_grows_by_the_bytes_that_were_forecast():
    ended = run([sys.executable, "-c", WIDE + REAL], timeout_s=120, env=SYSTEM)
    assert ended.code == 0, ended.out
    rows = re.findall(r'\["([\w ]+)", (\d+), (\d+)\]', ended.out)
    assert [name for name, _, _ in rows] == ["params", "moments", "step", "whole step"], ended.out
    for name, said, seen in rows:
        # Code, threads and what XLA notes of a program come on top; a part that was forgotten would be 47 MB.
        assert int(said) <= int(seen) + 2 * MB, (name, said, seen)
        assert int(seen) <= 1.05 * int(said) + 4 * MB, (name, said, seen)


# ---------------------------------------------------------------- what fits

HELD = WorkerMemory(
    params=100 * MB,
    optimizer_state=200 * MB,
    gradients=100 * MB,
    exchanged=100 * MB,
    activations=800 * MB,
    is_fused=False,
)


def forecast(tmp_path: Path, *line: str) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    cli.run(["forecast", str(tmp_path / "tiny.py"), "-n", "2", "--data.loader", "threads", *line])


def test_the_forecast_has_a_shard_for_each_device_of_each_rank(tmp_path, capsys):
    forecast(tmp_path, "--slots", "1", "--devices", "2")
    said = capsys.readouterr().out
    assert "4 workers x" in said
    assert "2 on a host" in said
    off, on = map(float, re.findall(r"optimizer state +(\S+) +(\S+)", said)[0])
    assert off / 4 <= on <= 1.05 * off / 4


@pytest.mark.parametrize(
    "line",
    [
        ("--exchange.strategy", "asa", "--exchange.shard-update", "on", "--exchange.overlap", "on"),
        ("--comm", "xla", "--exchange.strategy", "shm", "--exchange.shard-update", "on"),
    ],
)
def test_the_forecast_is_of_the_split_form_for_any_exchange(line, tmp_path, capsys):
    forecast(tmp_path, *line)
    said = capsys.readouterr().out
    assert "the split form" in said
    assert re.search(r"^gradients +\S+", said, re.MULTILINE)
    assert "params of host" not in said


def test_a_step_has_activations_or_an_exchange_and_in_one_program_gradients_are_among_them():
    assert HELD.at_once == 1200 * MB
    assert dataclasses.replace(HELD, activations=20 * MB).at_once == 500 * MB
    assert dataclasses.replace(HELD, exchanged=900 * MB).at_once == 1300 * MB
    assert dataclasses.replace(HELD, is_fused=True).at_once == 1100 * MB
    assert dataclasses.replace(HELD, batch=5 * MB, previous_state=300 * MB, checkpoint=300 * MB).at_once == 1805 * MB
    assert dataclasses.replace(HELD, average=1000 * MB).at_once == 1300 * MB
    assert dataclasses.replace(HELD, host_checkpoint=300 * MB).on_host(4) == 5100 * MB


def workers(size: int) -> Workers:
    return Workers(AxisComm("w", size), SoloProcesses(), (0,), None)


def planned(size: int, **change: object) -> tuple[Plan, WorkerMemory]:
    """A plan of digits, unsharded, on one host, with Adam if no other optimizer is named, and its memory."""
    plan = make_plan(
        dataclasses.replace(DIGITS, **{"optim": Optim("adam"), "effective_batch": 32 * size} | change), workers(size)
    )
    return plan, estimate_memory(plan, build.build_rule(plan, build.exchange_for(plan, Order())), is_fused=False)


@pytest.mark.usefixtures("standard_promotion")
def test_what_does_not_fit_is_refused_with_the_way_out():
    plan, _ = planned(4, exchange=ExchangeConfig("asa:32"))
    check_fits(HELD, plan, 4, 4800 * MB)
    for resume in (False, True):  # a resumed run keeps its batches
        with pytest.raises(UsageError, match=r"^memory: got 4 workers .*--exchange\.shard-update on") as error:
            check_fits(HELD, plan.with_fields(resume=resume), 4, 4799 * MB)
        assert ("--local-batch" in str(error.value)) != resume


@pytest.mark.usefixtures("standard_promotion")
def test_a_schedule_free_optimizer_of_one_s_own_is_not_sharded():
    transform = lambda lr: optax.contrib.schedule_free(optax.lion(lr, b1=0.0), lr)  # noqa: E731
    free = Optim("free", transform=transform, shard_by="element")
    planned(4, optim=free, exchange=ExchangeConfig("asa32"))
    with pytest.raises(UsageError, match=r"exchange.shard_update: got optimizer free, which is schedule-free"):
        planned(4, optim=free, exchange=ExchangeConfig("asa32", shard_update="on"))


@pytest.mark.usefixtures("standard_promotion")
def test_shards_leave_their_share_of_state_and_gradients(monkeypatch):
    monkeypatch.setattr(build, "SAVED_BYTES", 100_000)
    _, off = planned(4, exchange=ExchangeConfig("shm:32"))
    _, on = planned(4, exchange=ExchangeConfig("shm:32", shard_update="on"), optim=Optim("adam", ema=0.9))
    assert (off.params_of_host, off.average, off.gradients) == (0, 0, off.params)
    assert (on.params, on.params_of_host, on.average, on.gradients) == (0, off.params, off.params, off.params // 4)
    assert on.optimizer_state <= 1.05 * 1.5 * off.optimizer_state / 4


@pytest.mark.usefixtures("standard_promotion")
def test_checkpoints_are_copied_while_steps_go_on():
    often = {"train_for": "1ep", "checkpoint_every": "1st"}
    _, off = planned(4, exchange=ExchangeConfig("shm:32"), **often)
    assert (off.host_checkpoint, off.checkpoint) == (off.params + off.optimizer_state, off.model_state)
    _, on = planned(4, exchange=ExchangeConfig("shm:32", shard_update="on"), **often)
    assert (on.host_checkpoint, on.checkpoint) == (on.params_of_host, on.optimizer_state + on.model_state)
    _, last = planned(4, exchange=ExchangeConfig("shm:32"), train_for="1ep", checkpoint_every="0st")
    assert (last.checkpoint, last.host_checkpoint) == (0, 0)


@pytest.mark.parametrize(("factor", "is_short"), [(10**6, True), (0, False)])
def test_freed_memory_is_given_back_where_it_is_short(factor, is_short, tmp_path, monkeypatch):
    """tests/runtime/test_runtime.py has what glibc then does."""
    monkeypatch.delenv("JAXMPI_ALLOCATOR", raising=False)
    monkeypatch.setattr(memory, "KEEP_FACTOR", factor)
    called: list[bool] = []
    monkeypatch.setattr(memory, "give_back_at_once", lambda: called.append(True))
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: called.append(False))
    ended = train_here("digits", "--train-for", "1st", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 0, ended.out
    assert set(called) == {is_short}


def test_a_run_that_does_not_fit_is_refused_before_its_first_step(tmp_path, monkeypatch):
    free = iter([10 * MB, 0])  # before there is a state, and before the first step
    for module in ("main", "lock_step"):
        monkeypatch.setattr(f"jaxmpi.trainer.{module}.available_bytes", lambda: next(free))
    ended = train_here("digits", "--train-for", "1st", "--run-dir", str(tmp_path))
    assert ended.code == 2
    assert "memory: got 1 workers on this host" in ended.out
    assert "step 1/1" not in ended.out


@pytest.mark.parametrize(
    ("change", "word", "expected"),
    [
        ({}, "auto", "on: gradients do not exist together so"),
        ({}, "off", "off: as set"),
        ({"optim": Optim("lars")}, "auto", "off: optimizer lars takes whole tensors"),
        ({"micro_batch": 4}, "auto", "off: with gradient accumulation"),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_gradients_are_summed_as_they_come_where_params_are_shared_and_it_saves(change, word, expected, monkeypatch):
    monkeypatch.setattr(build, "SAVED_BYTES", 100_000)
    exchange = ExchangeConfig("shm", shard_update="on", overlap=word)
    plan = make_plan(dataclasses.replace(DIGITS, effective_batch=32, exchange=exchange, **change), workers(4))
    form = build.choose_form(plan)
    assert form.why.startswith(f"overlap {expected}")
    assert form.is_early == expected.startswith("on")
    if expected.startswith("off") and word == "auto":
        with pytest.raises(UsageError, match=r"exchange\.overlap"):
            build.choose_form(plan.with_exchange(overlap="on"))
