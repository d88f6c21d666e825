"""Memory of a worker before its first step: real bytes, whether they fit, and when updates are sharded."""

import ctypes
import dataclasses
import re
import resource
import sys
from pathlib import Path

import jax
import numpy as np
import optax.contrib
import pytest

from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.experiments.digits import experiment as DIGITS
from jaxmpi.rules import base
from jaxmpi.tools import cli
from jaxmpi.trainer import build, memory, resolve_auto, step_form
from jaxmpi.trainer.compatibility import UnfitForOverlap
from jaxmpi.trainer.memory import WorkerMemory, allocated, check_fits, estimate_memory, is_short
from jaxmpi.trainer.training_plan import Job, job_of, with_exchange
from launching import mpirun, run, train_here
from test_comm_xla import EXPERIMENT

MB = 1_000_000

# ---------------------------------------------------------------- real bytes

WIDE = """
import ctypes, dataclasses, json, re
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
from jaxmpi.allreduce.buckets import Order
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers, put
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim
from jaxmpi.experiments.digits import experiment
from jaxmpi.model.contract import Model
from jaxmpi.runtime import host_callbacks
from jaxmpi.trainer import build, memory
from jaxmpi.trainer.training_plan import job_of

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
job = job_of(asked, workers)
gradients = jax.jit(build.local_functions(job)[0])
batch = {"image": np.zeros((256, 8, 8, 1), np.uint8), "label": np.zeros(256, np.int32), "weight": np.ones(256, "f4")}
batch = jax.block_until_ready(jax.device_put(batch))
said = memory.forecast(job, batch)
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
functions = build.build_functions(job)
state = put(build.initial_states(job, functions.rule), workers)
functions.ahead.compiled(state, batch)
start = now()
jax.block_until_ready(functions.train_step(state, batch))
seen["whole step"] = bytes_of("VmHWM") - start
del state
words = {"params": said.params, "moments": said.optimizer_state, "whole step": said.activations}
words["step"] = said.gradients + said.activations  # in the whole, gradients come where activations were


def halve(operands, results, **options):
    results[0][:] = operands[0][:results[0].size]
    for x, to in zip(operands[1:], results[1:]):
        host_callbacks.copy_unless_shared(x, to)


two = Workers(AxisComm("workers", 2), SoloProcesses(), (0,), None)
exchange = ExchangeConfig("shm", shard_update="on")
asked = dataclasses.replace(asked, effective_batch=512, exchange=exchange)
job = job_of(asked, two)
said = memory.forecast(job, batch)
zero = build.exchange_for(job, "shm:32", Order(), False).zero
early = zero.scatter_early(build.local_functions(job)[0], memory.NO_SUM)
host_callbacks.register(memory.NO_SUM, halve)
jitted = jax.jit(early)  # a compiled program that is called by itself lacks the tokens of ordered calls
jitted.lower(*args).compile()
start = now()
jax.block_until_ready(jitted(*args))
seen["step of slices"] = bytes_of("VmHWM") - start
words["step of slices"] = said.gradients + said.activations
print("SEEN " + json.dumps([[name, words[name], seen[name]] for name in seen]))
"""


@pytest.mark.e2e
def test_a_worker_s_process_grows_by_the_bytes_that_were_forecast():
    ended = run(
        [sys.executable, "-c", WIDE + REAL], timeout_s=120, env={"JAXMPI_ALLOCATOR": "system", "JAX_PLATFORMS": "cpu"}
    )
    assert ended.code == 0, ended.out
    rows = re.findall(r'\["([\w ]+)", (\d+), (\d+)\]', ended.out)
    assert [name for name, _, _ in rows] == ["params", "moments", "step", "whole step", "step of slices"], ended.out
    for name, said, seen in rows:
        # Code, threads and what XLA notes of a program come on top; a part that was forgotten would be 47 MB.
        assert int(said) <= int(seen) + 2 * MB, (name, said, seen)
        assert int(seen) <= 1.05 * int(said) + 4 * MB, (name, said, seen)


START = """
from jaxmpi.comm.topology import gather_workers

WIDTH *= 4  # so that code and threads count little
workers = gather_workers(1, "mpi")
asked = dataclasses.replace(asked, optim=Optim("sgd"), exchange=ExchangeConfig("shm", shard_update="on"))
job = job_of(asked, workers)
rule = build.build_functions(job).rule
start = now()
states = build.initial_states(job, rule)
print("GROWN", workers.processes.rank, (bytes_of("VmHWM") - start) / (74 * 4 * WIDTH))
"""

PUT = """
import re
from pathlib import Path
import jax, numpy as np
from jaxmpi.comm.base import SoloComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers, put
from jaxmpi.core.train_state import create


def bytes_of(field):
    return int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10


workers = Workers(SoloComm(), SoloProcesses(), (0,), None)
put({0: create({"w": np.ones(1, np.float32)}, {}, {}, seed=0, worker=0)}, workers)
states = {0: create({str(i): np.ones(10_000_000, np.float32) for i in range(6)}, {}, {}, seed=0, worker=0)}
Path("/proc/self/clear_refs").write_text("5")
start = bytes_of("VmRSS")
state = jax.block_until_ready(put(states, workers))
print("SEEN", bytes_of("VmHWM") - start, len(states), float(state.params["5"].sum()))
"""


@pytest.mark.e2e
def test_no_rank_but_the_first_has_a_copy_of_shared_params_while_they_are_made():
    ended = mpirun(2, "-c", WIDE + START, timeout_s=120, env={"JAXMPI_ALLOCATOR": "system", "JAX_PLATFORMS": "cpu"})
    assert ended.code == 0, ended.out
    grown = {int(rank): float(times) for rank, times in re.findall(r"GROWN (\d) (\S+)", ended.out)}
    # Those that all share, and on the first rank those that are made; a copy more would be 1.
    assert grown[0] == pytest.approx(2, abs=0.3), grown
    assert grown[1] == pytest.approx(1, abs=0.3), grown


AVERAGE = """
from jaxmpi.comm.topology import gather_workers

MORE = 20_000_001  # a leaf that 2 workers do not divide


def init(key, image):
    return {"in": jnp.full((64, WIDTH), 0.01), "out": jnp.full((WIDTH, 10), 0.01), "odd": jnp.full(MORE, 0.01)}, {}


workers = gather_workers(1, "mpi")
model, exchange = Model("wide", init, apply, (8, 8, 1), 10), ExchangeConfig("shm", shard_update="on")
asked = dataclasses.replace(asked, model=model, optim=Optim("sgd", ema=0.9), exchange=exchange, effective_batch=8)
job = job_of(asked, workers)
functions = build.build_functions(job)
estimate = memory.estimate_memory(job, functions.rule, is_fused=False)
average = build.initial_states(job, functions.rule)[workers.processes.rank].rule_state
average = jax.block_until_ready(jax.device_put(average))
params = job.plan.params()
for _ in range(2):  # what the first one compiles stays
    start = now()
    whole = jax.block_until_ready(functions.eval_params(params, average))
    grown = now() - start
    del whole
print("SEEN", estimate.average, grown)
"""


@pytest.mark.e2e
def test_an_evaluation_gathers_an_average_of_the_bytes_that_were_forecast():
    ended = mpirun(2, "-c", WIDE + AVERAGE, timeout_s=120, env={"JAXMPI_ALLOCATOR": "system", "JAX_PLATFORMS": "cpu"})
    assert ended.code == 0, ended.out
    rows = re.findall(r"SEEN (\d+) (\d+)", ended.out)
    assert len(rows) == 2, ended.out
    for said, seen in rows:
        assert abs(int(said) - int(seen)) <= 4 * MB  # of 127


@pytest.mark.e2e
def test_a_state_that_goes_to_its_device_is_there_once_and_a_tensor_twice():
    ended = run([sys.executable, "-c", PUT], timeout_s=60, env={"JAXMPI_ALLOCATOR": "system", "JAX_PLATFORMS": "cpu"})
    seen = re.findall(r"SEEN (\d+) 0 10000000", ended.out)
    assert seen, ended.out
    assert int(seen[0]) <= 2.5 * 40 * MB  # of 240


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
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    cli.run(["forecast", str(tmp_path / "tiny.py"), "-n", "2", "--data.loader", "threads", *line])


def test_the_forecast_has_a_shard_for_each_device_of_each_rank(tmp_path, capsys):
    forecast(tmp_path, "--slots", "1", "--devices", "2")
    said = capsys.readouterr().out
    assert "4 workers x" in said
    assert "2 on a host" in said
    off, on = map(float, re.findall(r"optimizer's state +(\S+) +(\S+)", said)[0])
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
    assert "params of the host" not in said


def test_the_forecast_of_an_evaluation_has_the_whole_average(tmp_path, capsys):
    forecast(tmp_path, "--exchange.strategy", "shm", "--optim.ema", "0.9")
    said = capsys.readouterr().out
    params = re.findall(r"^params +(\S+)", said, re.MULTILINE)[0]
    assert re.search(rf"an evaluation's average +0 +{params}\n", said)


@pytest.mark.slow  # a run
def test_updates_that_are_sharded_by_themselves_are_those_that_must_fit(tmp_path, capsys, monkeypatch):
    must_fit = []
    monkeypatch.setattr(memory, "check_fits", lambda estimate, *_: must_fit.append(estimate))
    for least in (resolve_auto.SAVED_BYTES, 4):
        monkeypatch.setattr(resolve_auto, "SAVED_BYTES", least)
        forecast(tmp_path, "--exchange.strategy", "asa", "--exchange.shard-update", "auto")
        assert f"exchange.shard_update auto: {'on' if least == 4 else 'off'}, each" in capsys.readouterr().out
    assert [bool(estimate.shards) for estimate in must_fit] == [False, True]


def test_a_step_has_activations_or_an_exchange_and_in_one_program_gradients_are_among_them():
    assert HELD.at_once == 1200 * MB
    assert dataclasses.replace(HELD, activations=20 * MB).at_once == 500 * MB
    assert dataclasses.replace(HELD, exchanged=900 * MB).at_once == 1300 * MB
    assert dataclasses.replace(HELD, is_fused=True).at_once == 1100 * MB
    assert dataclasses.replace(HELD, batch=5 * MB, previous_state=300 * MB, checkpoint=300 * MB).at_once == 1805 * MB
    assert dataclasses.replace(HELD, average=1000 * MB).at_once == 1300 * MB
    assert dataclasses.replace(HELD, host_checkpoint=300 * MB).on_host(4) == 5100 * MB
    assert allocated(HELD, 4) == 1200 * MB


def workers(size: int) -> Workers:
    return Workers(AxisComm("w", size), SoloProcesses(), (0,), None)


def planned(size: int, **change: object) -> tuple[Job, WorkerMemory]:
    """A job of digits, unsharded, on one host, with Adam if no other optimizer is named, and its memory."""
    asked = dataclasses.replace(DIGITS, **{"optim": Optim("adam"), "effective_batch": 32 * size, **change})
    job = job_of(asked, workers(size))
    return job, estimate_memory(job, build.rule_in_program(job), is_fused=False)


def fixes(job: Job, estimate: WorkerMemory, free_mb: float) -> list[str]:
    """Options that a refusal names: host of 4 workers."""
    with pytest.raises(UsageError, match=r"^memory: got 4 workers on this host") as error:
        check_fits(estimate, job, 4, round(free_mb * MB))
    said = str(error.value).partition("are free: ")[2]
    return [re.sub(r" \(about.*", "", fix) for fix in said.split(", or ")]


@pytest.mark.usefixtures("standard_promotion")
def test_what_does_not_fit_is_refused_with_what_would():
    job, small = planned(4, exchange=ExchangeConfig("asa:32"), step_mode="split")
    estimate = dataclasses.replace(HELD, batch=small.batch)
    check_fits(estimate, job, 4, 4800 * MB)
    sharded = ["--exchange.shard-update on", "--exchange.shard-update on --exchange.strategy shm"]
    smaller = ["--local-batch 16", "--micro-batch 16"]
    assert fixes(job, estimate, 4799) == [*sharded, *smaller, "3 workers on this host"]
    # Micro-batches have the gradients of one beside their sum; digits, sharded, need the 800 MB of activations.
    assert fixes(job, estimate, 3300) == [*sharded, "--local-batch 16", "--micro-batch 8", "2 workers on this host"]
    assert fixes(job, estimate, 3100)[0] == "--local-batch 8"
    assert fixes(job, estimate, 100) == ["take a smaller model", "a host of more memory"]


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_that_is_resumed_keeps_its_batches():
    job, _ = planned(4, exchange=ExchangeConfig("tree:32"), optim=Optim("sgd"))
    assert "--local-batch 16" in fixes(job, HELD, 4799)
    assert not any("batch" in fix for fix in fixes(job.with_fields(resume=True), HELD, 4799))


def rule_of(word: str, optim: Optim) -> base.Rule:
    """The rule of digits on four workers with sharded updates on or off."""
    asked = dataclasses.replace(DIGITS, optim=optim, exchange=ExchangeConfig("asa32", shard_update=word))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Optax counts on it
        return build.rule_in_program(job_of(asked, workers(4)))


def test_a_checkpoint_has_the_same_names_with_sharded_updates_which_clip_elsewhere():
    shapes = job_of(DIGITS, workers(4)).plan.params()
    off, on = (
        [name for name, _ in named_leaves(build.rule_state(rule_of(word, Optim("adam", clip_norm=1.0)), shapes))]
        for word in ("off", "on")
    )
    assert on == off


def test_a_mask_that_decays_nothing_decays_nothing_of_slices():
    optim = Optim("sgd", lr=1.0, weight_decay=0.5, decay_mask=lambda params: False)
    rule, shapes = rule_of("on", optim), job_of(DIGITS, workers(4)).plan.params()
    tx = rule.sharding.tx if rule.sharding else None
    assert tx
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    zeros = jax.tree.map(np.zeros_like, ones)
    update, _ = tx.update(zeros, tx.init(ones), ones)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(update))


def test_a_mask_by_size_decays_slices_of_large_tensors_and_sees_arrays_as_optimizers_show_them():
    """A slice of the largest bias is smaller than the limit, and the largest kernel's is not the whole."""
    large = lambda params: jax.tree.map(lambda x: x.reshape(-1).size > 4096, params)  # noqa: E731
    rule = rule_of("on", Optim("sgd", lr=1.0, weight_decay=0.5, decay_mask=large))
    assert rule.sharding
    shapes = job_of(DIGITS, workers(4)).plan.params()
    slices = jax.tree.map(lambda leaf: np.ones(-(-leaf.size // 4), np.float32), shapes)
    zeros = jax.tree.map(np.zeros_like, slices)
    update, _ = rule.sharding.tx.update(zeros, rule.sharding.tx.init(slices), slices)
    decayed = {name: bool(np.any(leaf)) for name, leaf in named_leaves(update)}
    assert decayed == {name: leaf.size > 4096 for name, leaf in named_leaves(shapes)}
    assert 0 < sum(decayed.values()) < len(decayed)


def test_a_schedule_free_optimizer_of_one_s_own_is_not_sharded():
    free = Optim("free", transform=lambda lr: optax.contrib.schedule_free(optax.lion(lr, b1=0.0), lr))
    assert rule_of("off", free).eval_params
    with pytest.raises(UsageError, match=r"exchange.shard_update: got on with optimizer free, which is schedule-free"):
        rule_of("on", free)


@pytest.mark.usefixtures("standard_promotion")
def test_shards_leave_their_share_of_state_and_gradients(monkeypatch):
    monkeypatch.setattr(step_form, "SAVED_BYTES", 100_000)
    _, off = planned(4, exchange=ExchangeConfig("shm:32"))
    _, on = planned(4, exchange=ExchangeConfig("shm:32", shard_update="on"), optim=Optim("adam", ema=0.9))
    assert (off.shared, off.average, off.gradients) == (0, 0, off.params)
    assert (on.shared, on.average, on.gradients) == (on.params, on.params, on.params // 4)
    assert on.optimizer_state <= 1.05 * 1.5 * off.optimizer_state / 4


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_that_may_be_skipped_has_the_state_before_it_and_a_third_one():
    _, plain = planned(4, exchange=ExchangeConfig("asa:32"))
    _, skips = planned(4, exchange=ExchangeConfig("asa:32"), on_nonfinite="skip")
    assert (plain.previous_state, plain.exchanged) == (0, plain.params)
    assert skips.previous_state == skips.exchanged == plain.state


@pytest.mark.usefixtures("standard_promotion")
def test_checkpoints_are_copied_while_steps_go_on():
    often = {"train_for": "1ep", "checkpoint_every": "1st"}
    _, off = planned(4, exchange=ExchangeConfig("shm:32"), **often)
    assert (off.host_checkpoint, off.checkpoint) == (off.params + off.optimizer_state, off.model_state)
    _, on = planned(4, exchange=ExchangeConfig("shm:32", shard_update="on"), **often)
    assert (on.host_checkpoint, on.checkpoint) == (on.params, on.optimizer_state + on.model_state)
    _, last = planned(4, exchange=ExchangeConfig("shm:32"), train_for="1ep", checkpoint_every="0st")
    assert (last.checkpoint, last.host_checkpoint) == (0, 0)


def test_freed_memory_is_given_back_at_once_where_twice_what_is_held_is_not_free(monkeypatch):
    monkeypatch.delenv("JAXMPI_ALLOCATOR", raising=False)
    assert not is_short(HELD, 4, 9600 * MB)
    assert is_short(HELD, 4, 9599 * MB)
    monkeypatch.setenv("JAXMPI_ALLOCATOR", "keep")
    assert not is_short(HELD, 4, 9599 * MB)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc only")
def test_a_run_that_is_short_of_memory_gives_it_back_and_the_next_one_keeps_it(tmp_path, monkeypatch):
    def freed_stays() -> bool:
        held = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # noqa: E731
        block = np.ones(64 * MB // 8)
        before = held()
        del block
        return held() > before - 32 * MB

    monkeypatch.delenv("JAXMPI_ALLOCATOR", raising=False)
    for times, word in ((10**6, "given back at once"), (2, "MB at once")):
        monkeypatch.setattr("jaxmpi.trainer.memory.KEEP_FACTOR", times)
        ended = train_here("digits", "--train-for", "1st", "--run-dir", str(tmp_path / word))
        assert ended.code == 0, ended.out
        assert word in ended.out
        assert freed_stays() == (times == 2)


def test_a_run_that_does_not_fit_is_refused_before_its_first_step(tmp_path, monkeypatch):
    free = iter([10 * MB, 0])  # before there is a state, and before the first step
    for module in ("main", "lock_step"):
        monkeypatch.setattr(f"jaxmpi.trainer.{module}.available_bytes", lambda: next(free))
    ended = train_here("digits", "--train-for", "1st", "--run-dir", str(tmp_path))
    assert ended.code == 2
    assert "memory: got 1 worker on this host" in ended.out
    assert "each worker holds, in MB, 0.212 of params" in ended.out
    assert "step 1/1" not in ended.out


# ---------------------------------------------------------------- fewer workers than a run began with


@pytest.mark.parametrize(
    ("exchange", "micro_batch", "overlap"),
    [
        (ExchangeConfig("ring32", overlap="on"), 0, "off"),
        (ExchangeConfig("ring32", overlap="auto"), 0, "auto"),
        (ExchangeConfig("ring32", overlap="on"), 4, "on"),  # micro-batches that the user asks for are refused with it
    ],
)
def test_options_for_more_workers_do_not_end_a_run_on_fewer(exchange, micro_batch, overlap):
    asked = dataclasses.replace(DIGITS, effective_batch=32, micro_batch=micro_batch, exchange=exchange)
    job, why = resolve_auto.resolve_overlap(job_of(asked, workers(2), scaled_for=4))
    assert job.experiment.exchange.overlap == overlap
    assert why.startswith("overlap off: a worker's 16 examples") == (overlap == "off")


# ---------------------------------------------------------------- --exchange.shard-update auto


@pytest.mark.parametrize(
    ("size", "change", "expected"),
    [
        (4, {}, "on, each of 4 workers holds 0.106 of 0.424 MB"),
        (1, {}, "off, there is one worker"),
        (4, {"exchange": ExchangeConfig("tree:32")}, "off, got strategy 'tree:32' for sharded updates; expected"),
        (
            4,
            {"optim": Optim("schedule_free_sgd"), "schedule": Schedule("constant")},
            "off, exchange.shard_update: got on",
        ),
        (4, {"optim": Optim("lamb")}, "off, rows of whole tensors would be filled up"),
        (4, {"optim": Optim("sgd")}, "off, each worker would hold 0 MB of the optimizer's state less"),
        (4, {"optim": Optim("adam", ema=0.9)}, "on, each of 4 workers holds 0.159 of 0.636 MB"),
        (4, {"rule": RuleConfig("subgd")}, "off, rule.name: got subgd with exchange.shard_update on"),
        (4, {"on_rank_loss": "shrink"}, "off, on_rank_loss shrink would go back to a checkpoint"),
    ],
)
def test_auto_shards_updates_where_it_can_and_saves_and_says_why_not(size, change, expected, monkeypatch):
    monkeypatch.setattr(resolve_auto, "SAVED_BYTES", 100_000)
    asked: Experiment = dataclasses.replace(DIGITS, optim=Optim("adam"), effective_batch=32)
    asked = dataclasses.replace(asked, **change)
    asked = dataclasses.replace(asked, exchange=dataclasses.replace(asked.exchange, shard_update="auto"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Optax counts on it
        settled, why = resolve_auto.resolve_shards(job_of(asked, workers(size)))
    assert why.startswith(f"exchange.shard_update auto: {expected}"), why
    assert settled.experiment.exchange.shard_update == expected[: expected.index(",")]


def test_auto_leaves_updates_whole_if_slices_could_not_stay_beside_the_backward_pass(monkeypatch):
    monkeypatch.setattr(resolve_auto, "SAVED_BYTES", 100_000)
    monkeypatch.setattr(resolve_auto, "chosen_overlap", lambda *args: (True, "overlap on: ranks are on 2 hosts"))
    exchange = ExchangeConfig("hier-asa", shard_update="auto")
    asked = dataclasses.replace(DIGITS, optim=Optim("adam"), exchange=exchange, batch_statistics="synchronised")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Optax counts on it
        settled, why = resolve_auto.resolve_shards(job_of(asked, workers(4)))
    assert settled.experiment.exchange.shard_update == "off"
    assert why.endswith(f"sharded it could not: {UnfitForOverlap.SLICES}")


@pytest.mark.parametrize(
    ("change", "asked", "expected"),
    [
        ({}, "auto", "on: gradients do not exist together so"),
        ({}, "off", "off: as set"),
        ({"optim": Optim("lars")}, "auto", "off: optimizer lars takes whole tensors, of which gradients are dealt to"),
        ({"micro_batch": 4}, "auto", "off: gradients come to exist with the last micro-batch only"),
        ({"step_mode": "split"}, "auto", "off: the step is split"),
    ],
)
def test_gradients_are_summed_as_they_come_where_params_are_shared_and_it_saves(change, asked, expected, monkeypatch):
    monkeypatch.setattr(step_form, "SAVED_BYTES", 100_000)
    exchange = ExchangeConfig("shm", shard_update="on", overlap=asked)
    experiment = dataclasses.replace(DIGITS, effective_batch=32, exchange=exchange, **change)
    job = job_of(experiment, workers(4))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        is_early, why = step_form.is_scattered_early(job, "shm:32")
        assert why.startswith(f"overlap {expected}"), why
        assert is_early == expected.startswith("on")
        if expected.startswith("off") and asked == "auto":
            with pytest.raises(UsageError, match=r"exchange\.overlap: got on, but"):
                step_form.is_scattered_early(with_exchange(job, overlap="on"), "shm:32")
