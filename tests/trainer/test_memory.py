"""Memory of a worker before its first step: real bytes, whether they fit, and when updates are sharded."""

import ctypes
import dataclasses
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax.contrib
import pytest

from jaxmpi.allreduce.shards import shards_of
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.deals import deal
from jaxmpi.core.errors import UsageError
from jaxmpi.core.pytrees import named_leaves, size_bytes
from jaxmpi.data.feed import DeviceFeed
from jaxmpi.experiments.digits import experiment as DIGITS
from jaxmpi.optim.optimizers import OPTIMIZERS, optimizer, state_arrays
from jaxmpi.rules import base
from jaxmpi.rules.gradients import measured, sharded
from jaxmpi.tools import cli
from jaxmpi.trainer import build, memory_forecast, resolve_auto, step_form
from jaxmpi.trainer.compatibility import UnfitForOverlap
from jaxmpi.trainer.memory import (
    DEALT_ARRAYS,
    WorkerMemory,
    allocated,
    check_fits,
    held,
    is_short,
    with_activations,
    words,
    words_of_step,
)
from jaxmpi.trainer.training_plan import job_of, with_exchange
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
from jaxmpi.trainer import build, memory_forecast
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
said = memory_forecast.forecast(asked, workers).off
job = job_of(asked, workers)
gradients = jax.jit(build.local_functions(job)[0])
batch = {"image": np.zeros((256, 8, 8, 1), np.uint8), "label": np.zeros(256, np.int32), "weight": np.ones(256, "f4")}
batch = jax.block_until_ready(jax.device_put(batch))
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
words = {"params": said.params, "moments": said.moments, "whole step": said.activations}
words["step"] = said.gradients + said.activations  # in the whole, gradients come where activations were


def halve(operands, results, **options):
    results[0][:] = operands[0][:results[0].size]
    for x, to in zip(operands[1:], results[1:]):
        host_callbacks.copy_unless_shared(x, to)


two = Workers(AxisComm("workers", 2), SoloProcesses(), (0,), None)
exchange = ExchangeConfig("shm", shard_update="on")
asked = dataclasses.replace(asked, effective_batch=512, exchange=exchange)
said = memory_forecast.forecast(asked, two).on
job = job_of(asked, two)
shards = build.exchange_for(job, "shm:32", Order(), False).shards
early = shards.scattering(build.local_functions(job)[0], memory_forecast.NO_SUM)
host_callbacks.register(memory_forecast.NO_SUM, halve)
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
from jaxmpi.trainer import memory

MORE = 20_000_001  # a leaf that 2 workers do not divide


def init(key, image):
    return {"in": jnp.full((64, WIDTH), 0.01), "out": jnp.full((WIDTH, 10), 0.01), "odd": jnp.full(MORE, 0.01)}, {}


workers = gather_workers(1, "mpi")
model, exchange = Model("wide", init, apply, (8, 8, 1), 10), ExchangeConfig("shm", shard_update="on")
asked = dataclasses.replace(asked, model=model, optim=Optim("sgd", ema=0.9), exchange=exchange, effective_batch=8)
job = job_of(asked, workers)
functions = build.build_functions(job)
of = memory.held(job, functions.rule, functions.strategy, is_whole=False)
average = build.initial_states(job, functions.rule)[workers.processes.rank].rule_state
average = jax.block_until_ready(jax.device_put(average))
params = job.plan.params()
for _ in range(2):  # what the first one compiles stays
    start = now()
    whole = jax.block_until_ready(functions.eval_params(params, average))
    peak = bytes_of("VmHWM") - start
    kept = now() - start
    del whole
rows = [["gathered", of.average + of.average_buckets, peak], ["kept", of.average, kept]]
print("SEEN " + json.dumps(rows))
"""


@pytest.mark.e2e
def test_an_evaluation_gathers_an_average_of_the_bytes_that_were_forecast():
    ended = mpirun(2, "-c", WIDE + AVERAGE, timeout_s=120, env={"JAXMPI_ALLOCATOR": "system", "JAX_PLATFORMS": "cpu"})
    assert ended.code == 0, ended.out
    rows = re.findall(r'\["(\w+)", (\d+), (\d+)\]', ended.out)
    assert sorted(name for name, _, _ in rows) == ["gathered", "gathered", "kept", "kept"], ended.out
    for name, said, seen in rows:
        # The average is 127 MB, and while it is gathered 80 of them are there twice.
        assert abs(int(said) - int(seen)) <= 4 * MB, (name, said, seen)


@pytest.mark.e2e
def test_a_state_that_goes_to_its_device_is_there_once_and_a_tensor_twice():
    ended = run([sys.executable, "-c", PUT], timeout_s=60, env={"JAXMPI_ALLOCATOR": "system", "JAX_PLATFORMS": "cpu"})
    seen = re.findall(r"SEEN (\d+) 0 10000000", ended.out)
    assert seen, ended.out
    assert int(seen[0]) <= 2.5 * 40 * MB  # of 240


# ---------------------------------------------------------------- what fits

HELD = WorkerMemory(
    params=100 * MB,
    model_state=0,
    moments=200 * MB,
    whole_moments=200 * MB,
    before=0,
    gradients=100 * MB,
    exchange=300 * MB,
    update=100 * MB,
    is_whole=False,
    activations=800 * MB,
)
ON = dataclasses.replace(HELD, moments=50 * MB, is_sharded=True, workers=4)
# With one copy of the params and gradients as slices; the largest gradient is 40 MB.
EARLY = dataclasses.replace(
    ON,
    shares_params=True,
    is_early=True,
    takes_micro_batches=False,
    gradients=25 * MB,
    exchange=25 * MB,
    update=0,
    bucket=40 * MB,
    activations=840 * MB,
)
SHM = "--exchange.strategy shm --exchange.shard-update on"
WITH_OTHERS = dataclasses.replace(HELD, others=(("--exchange.shard-update on", ON), (SHM, EARLY)))


def test_the_forecast_has_a_slice_for_each_device_of_each_rank(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    cli.run(
        ["forecast", str(tmp_path / "tiny.py"), "-n", "2", "--slots", "1", "--devices", "2", "--data.loader", "threads"]
    )
    said = capsys.readouterr().out
    assert "4 workers x" in said
    assert "2 on a host" in said
    off, on = map(float, re.findall(r"optimizer's state +(\S+) +(\S+)", said)[0])
    assert off / 4 <= on <= 1.05 * off / 4
    off, on = map(float, re.findall(r"a process +(\S+) +(\S+)", said)[0])  # a rank's is two workers'
    assert 0.5 * memory_forecast.RANK_BYTES <= off * MB <= on * MB <= 0.6 * memory_forecast.RANK_BYTES


def test_the_forecast_of_a_step_with_overlap_is_of_the_split_form_and_says_so(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    line = ["--exchange.strategy", "asa", "--exchange.shard-update", "on", "--exchange.overlap", "on"]
    cli.run(["forecast", str(tmp_path / "tiny.py"), "-n", "2", "--data.loader", "threads", *line])
    said = capsys.readouterr().out
    assert re.search(r"--exchange.shard-update +off +on\n", said)
    assert "overlap on takes the fused form: here are the parts of the split one" in said


def test_a_compressor_has_a_forecast(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    line = ["-n", "2", "--data.loader", "threads", "--exchange.strategy", "lowrank2/ring16"]
    cli.run(["forecast", str(tmp_path / "tiny.py"), *line])
    assert "gradients" in capsys.readouterr().out


def test_the_forecast_of_workers_that_xla_joins_has_no_params_of_the_host(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    line = ["--comm", "xla", "--exchange.strategy", "shm", "--exchange.shard-update", "on", "--data.loader", "threads"]
    cli.run(["forecast", str(tmp_path / "tiny.py"), "-n", "2", *line])
    said = capsys.readouterr().out
    assert re.search(r"--exchange.shard-update +off +on\n", said)
    assert "params of the host" not in said
    assert "comm xla takes the fused form: here are the parts of the split one" in said


def test_the_forecast_of_an_evaluation_has_the_whole_average_and_the_activations_of_the_local_batch(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    line = [str(tmp_path / "tiny.py"), "-n", "2", "--data.loader", "threads", "--exchange.strategy", "shm"]
    seen = []
    for micro_batch in ("30", "10"):
        cli.run(["forecast", *line, "--optim.ema", "0.9", "--micro-batch", micro_batch])
        seen.append(capsys.readouterr().out)
    params = re.findall(r"^params +(\S+)", seen[0], re.MULTILINE)[0]
    assert re.search(rf"an evaluation's average +0 +{params}\n", seen[0])
    each = [re.findall(r"an evaluation's activations +0 +(\S+)\n", said) for said in seen]
    assert each[0] == each[1]
    assert float(each[0][0]) > 0


def test_the_forecast_of_an_evaluation_without_examples_has_no_activations(tmp_path, capsys, monkeypatch):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    batches = DeviceFeed.batches
    monkeypatch.setattr(DeviceFeed, "batches", lambda feed: batches(feed) if feed.train else (x for x in ()))
    line = ["-n", "2", "--data.loader", "threads", "--exchange.strategy", "shm", "--optim.ema", "0.9"]
    cli.run(["forecast", str(tmp_path / "tiny.py"), *line])
    said = capsys.readouterr().out
    assert "an evaluation's average" in said
    assert "an evaluation's activations" not in said


@pytest.mark.slow  # a run
def test_updates_that_are_sharded_by_themselves_are_those_that_must_fit(tmp_path, capsys, monkeypatch):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    line = ["--exchange.strategy", "asa", "--exchange.shard-update", "auto", "--data.loader", "threads"]
    must_fit = []
    monkeypatch.setattr(memory_forecast, "check_fits", lambda of, *_: must_fit.append(of))
    for least in (resolve_auto.SAVED_BYTES, 4):
        monkeypatch.setattr(resolve_auto, "SAVED_BYTES", least)
        cli.run(["forecast", str(tmp_path / "tiny.py"), "-n", "4", *line])
        assert f"exchange.shard_update auto: {'on' if least == 4 else 'off'}, each" in capsys.readouterr().out
    assert [of.is_sharded for of in must_fit] == [False, True]


def test_what_a_step_holds_and_is_there_before_it():
    assert allocated(ON, 4) == 4 * (100 + 50) * MB
    assert allocated(EARLY, 4) == (4 * 50 + 100) * MB  # one copy of the params


def test_a_step_holds_activations_or_buckets_and_in_one_program_gradients_are_among_them():
    assert HELD.at_once == 1200 * MB
    assert dataclasses.replace(HELD, activations=20 * MB).at_once == 700 * MB
    assert dataclasses.replace(HELD, update=900 * MB).at_once == 1300 * MB
    assert dataclasses.replace(HELD, is_whole=True).at_once == 1100 * MB
    assert dataclasses.replace(HELD, saved=300 * MB).at_once == 1500 * MB
    assert dataclasses.replace(HELD, saved_once=300 * MB).on_host(4) == 5100 * MB


def test_an_evaluation_counts_where_it_holds_more_than_a_step():
    # 50 of moments, the params once a host; a step has 25 of gradients and 840 of activations beside them.
    averaged = dataclasses.replace(EARLY, average=100 * MB, average_buckets=80 * MB, before=30 * MB)
    assert averaged.at_once == (30 + 50 + 25 + 840) * MB
    small = dataclasses.replace(averaged, activations=1 * MB)
    assert small.at_once == (50 + 100 + 80) * MB
    assert dataclasses.replace(small, eval_activations=90 * MB).at_once == (50 + 100 + 90) * MB
    assert dataclasses.replace(small, saved=10 * MB).at_once == (10 + 50 + 100 + 80) * MB


def test_a_line_before_the_first_step_names_an_evaluation_that_holds_more():
    averaged = dataclasses.replace(EARLY, activations=1 * MB, average=100 * MB)
    line = words_of_step(averaged, 4, 2000 * MB)
    assert line.startswith(
        "a step holds 1 MB of activations and a bucket, 100 MB at once, an evaluation 150: 700 for 4 workers"
    )
    assert "an evaluation" not in words_of_step(EARLY, 4, 2000 * MB)


def programs_of_updates(name: str, params: dict) -> Iterator[tuple[int, Any, tuple]]:
    """An optimizer's updates as rules jit them, whole and of slices: arrays that they take at most, jit, arguments."""
    config = Optim(name, weight_decay=0.1)
    alone, clipping = (
        optimizer(each, lambda step: np.float32(0.1)) for each in (config, dataclasses.replace(config, clip_norm=1.0))
    )
    jitted: list[Any] = []

    def jit(function: Any, **options: Any) -> Any:
        jitted.append(jax.jit(function, **options))
        return jitted[-1]

    most = state_arrays(config)
    of_rules: list[tuple[Any, Any, int]] = [
        (alone, base.jit_optimizer_step, most),
        (clipping, base.jit_optimizer_step, most),
    ]
    if name in ("momentum", "adamw", "lion"):  # of each kind one
        of_rules += [
            (
                alone,
                lambda tx, jit: measured(tx, base.Exchange(jit, jit, jit)),
                state_arrays(config, gives_square=True),
            ),
            (alone, base.jit_optimizer_updates, most + 1),  # the updates lie nowhere else
        ]
    for tx, of, arrays in of_rules:
        of(tx, jit)
        yield arrays, jitted[-1], (params, jax.eval_shape(tx.init, params), params)
    cut = OPTIMIZERS[name].cut
    for wire in ("32", "16")[: 2 if name == "adamw" else 1] if cut else ():
        dealt = deal(params, 2) if cut == "leaves" else None
        halves = shards_of("asa32", "mean", AxisComm("w", 2), None, deal=dealt, gather_wire=wire)
        sharding, chunk = sharded(alone, halves, jit).sharding, jax.ShapeDtypeStruct((), np.int32)
        assert sharding
        own, state = jax.eval_shape(halves.cut.own, params, chunk), jax.eval_shape(sharding.init, params, chunk)
        of_slice = jitted[-2]  # then comes the sum of params and changes
        yield most + DEALT_ARRAYS * (dealt is not None), of_slice, (own, state, params, chunk)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the table is of XLA on CPUs")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_lies_where_its_arguments_did_and_takes_no_more_arrays_than_the_table_says(name):
    shapes = {"in": (300, 256), "a": (256, 512), "b": (256, 512), "bias": (512,), "out": (512, 150)}
    params = {leaf: jax.ShapeDtypeStruct(shape, np.float32) for leaf, shape in shapes.items()}
    spare = []
    for most, jitted, args in programs_of_updates(name, params):
        found = jitted.lower(*args).compile().memory_analysis()
        beside = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        spare.append(most - beside / size_bytes(args[0]))
    assert min(spare) >= -0.01  # beside arrays are single numbers
    assert min(spare) < 1
    assert OPTIMIZERS[name].cut != "leaves" or spare[-1] <= DEALT_ARRAYS - 2


def workers(size: int) -> Workers:
    return Workers(AxisComm("w", size), SoloProcesses(), (0,), None)


def refusal(of: WorkerMemory, here: int, free_mb: int, batch: int = 32) -> str:
    with pytest.raises(UsageError) as error:
        check_fits(of, here, batch, free_mb * MB)
    return str(error.value)


def test_what_does_not_fit_is_refused_with_what_would():
    check_fits(WITH_OTHERS, 4, 32, 4800 * MB)
    text = refusal(WITH_OTHERS, 4, 4799)
    assert "got 4 workers on this host, 1,200 MB each (100 of params, 200 of optimizer's state, 100 of grad" in text
    assert "4,800 in all; expected at most the 4,799 that are free: --local-batch 16 (about 800 each), or --" in text
    assert "or --exchange.shard-update on (about 1,050 each), or" in text
    assert f"or {SHM} (about 915 each), or 3 workers on this host, with --local-batch 32 (about 1,200 each)" in text
    assert "take a smaller model" in refusal(HELD, 4, 300)


def test_a_micro_batch_is_offered_with_gradients_of_one_more_and_not_where_they_leave_early():
    text = refusal(WITH_OTHERS, 4, 3300)
    assert ": --local-batch 16 (about 800 each), or --micro-batch 8 (about 700 each), or --exch" in text
    # 50 of moments, 25 + 40 that no batch changes, and half of 800; the params once.
    assert f"{SHM} with --local-batch 16 (about 515 each)" in text
    assert f"{SHM} with --micro" not in text
    summed = dataclasses.replace(HELD, is_summed=True)  # 100 of its 800 are gradients
    text = refusal(summed, 4, 4000, batch=8)
    assert "--micro-batch 4 (about 850 each), or 3 workers on this host, with --micro-batch 8" in text
    assert "--local-batch" not in text


def test_what_an_evaluation_gathers_is_refused_and_its_activations_go_by_the_local_batch():
    averaged = dataclasses.replace(ON, activations=0, average=100 * MB, average_buckets=500 * MB, eval_activations=0)
    text = refusal(averaged, 4, 2999)
    assert "750 MB each (" in text
    assert ", 100 of an evaluation's average, 500 of buckets of the average)" in text
    evaluating = dataclasses.replace(averaged, average_buckets=0, eval_activations=800 * MB)
    assert ": --local-batch 16 (about 650 each), or 2 workers" in refusal(evaluating, 4, 2600)
    assert "--micro-batch" not in refusal(evaluating, 4, 2600)


def test_a_run_that_is_resumed_keeps_its_batches():
    text = refusal(dataclasses.replace(WITH_OTHERS, batch_stays=True), 4, 4799)
    assert text.endswith(f"that are free: --exchange.shard-update on (about 1,050 each), or {SHM} (about 915 each)")


def test_slices_of_fewer_workers_are_larger():
    assert "2 workers on this host, with --local-batch 32 (about 1,100 each)" in refusal(ON, 4, 2300)
    assert "2 workers" not in refusal(ON, 4, 2199)  # and one worker alone has no slices
    on_hosts = dataclasses.replace(ON, moments=25 * MB, workers=8)
    assert "1 worker on this host, with --local-batch 32 (about 1,100 each)" in refusal(on_hosts, 4, 1100)
    two = EARLY.with_fewer(0.5)
    assert (two.moments, two.gradients, two.exchange, two.activations) == (100 * MB, 50 * MB, 50 * MB, 840 * MB)


def planned(size: int, **change: object) -> WorkerMemory:
    """The memory of digits, unsharded, on one host, with Adam if no other optimizer is named."""
    asked = dataclasses.replace(DIGITS, **{"optim": Optim("adam"), "effective_batch": 32, **change})
    job = job_of(asked, workers(size))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Optax counts on it
        return held(job, build.rule_in_program(job), asked.exchange.strategy, is_whole=False)


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


def test_a_run_knows_what_sharded_updates_and_one_copy_of_the_params_would_hold(monkeypatch):
    monkeypatch.setattr(step_form, "SAVED_BYTES", 100_000)
    others = dict(planned(4, step_mode="split", exchange=ExchangeConfig("asa:32")).others)
    assert set(others) == {"--exchange.shard-update on", SHM}
    assert others["--exchange.shard-update on"].moments <= 1.05 * others[SHM].whole_moments / 4
    assert others[SHM].shares_params
    assert not others[SHM].is_early  # the step is split
    own = planned(4, exchange=ExchangeConfig("shm:32", bucket_bytes=1 << 16))
    [(option, early)] = with_activations(own, 1 * MB).others
    assert option == "--exchange.shard-update on"
    assert (early.is_early, early.bucket) == (True, 131_072)  # 64 x 512 f32
    assert early.activations == 1 * MB + 131_072


def test_a_sharded_average_is_gathered_whole_and_small_or_uneven_tensors_of_it_are_there_twice():
    exchange = ExchangeConfig("shm:32", shard_update="on", bucket_bytes=1 << 16)
    off, on = (planned(4, exchange=each, optim=Optim("adam", ema=0.9)) for each in (ExchangeConfig("shm:32"), exchange))
    assert (off.average, off.average_buckets) == (0, 0)
    assert planned(4, exchange=exchange).average == 0
    # 256 x 128 and 3 x 3 x 32 x 64 f32 are above a bucket: they travel alone, and need no zeros for 4 workers.
    assert (on.average, on.average_buckets) == (on.params, on.params - 131_072 - 73_728)
    of_five = planned(5, exchange=exchange, optim=Optim("adam", ema=0.9), effective_batch=40)
    assert of_five.average_buckets == of_five.params
    lamb = planned(2, exchange=exchange, optim=Optim("lamb", ema=0.9))
    assert lamb.average_buckets == round(2 * lamb.params * (1 + lamb.padding))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_masters_are_no_part_of_a_state_that_is_not_sharded(name):
    exchange = ExchangeConfig("asa:32", shard_update="on", gather_wire="16")
    off, on = (planned(4, exchange=each, optim=Optim(name)) for each in (ExchangeConfig("asa:32"), exchange))
    assert on.whole_moments == off.moments


@pytest.mark.parametrize(
    ("moments", "whole", "said"),
    [
        (50, 200, "50 of 200 of the optimizer's state"),
        (25, 0, "25 of the optimizer's state (0 without sharded updates)"),  # masters of sgd
        (0, 0, "0 of the optimizer's state"),
    ],
)
def test_a_headline_says_that_updates_are_sharded_and_what_that_saves_or_adds(moments, whole, said):
    of = dataclasses.replace(ON, moments=moments * MB, whole_moments=whole * MB)
    start = "updates sharded over 4 workers: each worker holds, in MB, 100 of params, "
    assert words(of, 4).startswith(f"{start}{said}, 100 of gradients")


def test_an_update_is_forecast_by_its_optimizer_and_cut(monkeypatch):
    monkeypatch.setattr(step_form, "SAVED_BYTES", 100_000)
    adam = planned(4, step_mode="split", exchange=ExchangeConfig("asa:32"))
    on = dict(adam.others)["--exchange.shard-update on"]
    assert (adam.update, on.update) == (adam.params, -(-adam.params // 4))  # the mean gradient, and a slice of it
    skips = planned(4, step_mode="split", exchange=ExchangeConfig("asa:32"), on_nonfinite="skip")
    assert (skips.update, skips.chosen) == (adam.update, adam.params + adam.model_state + adam.moments)
    on = dict(skips.others)["--exchange.shard-update on"]
    assert on.with_fewer(0.5).chosen == on.chosen + on.moments
    assert on.with_fewer(0.5).update == 2 * on.update
    early = planned(4, exchange=ExchangeConfig("shm:32", bucket_bytes=1 << 16), optim=Optim("lion", clip_norm=1.0))
    slices = -(-early.params // 4)
    assert [(held.is_early, held.update) for _, held in early.others] == [(True, 3 * slices)]
    for size in (2, 4):
        lamb = planned(size, step_mode="split", exchange=ExchangeConfig("asa:32"), optim=Optim("lamb"))
        on = dict(lamb.others)["--exchange.shard-update on"]
        assert lamb.update == 3 * lamb.params
        assert on.update == round((3 + DEALT_ARRAYS) * (lamb.params // size) * (1 + on.padding))


def test_checkpoints_are_copied_beside_the_steps_that_go_on():
    own = planned(4, exchange=ExchangeConfig("shm:32"), train_for="1ep", checkpoint_every="1st")
    assert own.saved_once == own.params + own.moments  # equal on all workers, so one writes them
    assert own.saved == own.model_state
    on = dict(own.others)["--exchange.shard-update on"]
    assert (on.saved_once, on.saved) == (on.params, on.moments + on.model_state)
    only_last = planned(4, exchange=ExchangeConfig("shm:32"), train_for="1ep", checkpoint_every="0st")
    assert (only_last.saved, only_last.saved_once) == (0, 0)


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
        monkeypatch.setattr("jaxmpi.trainer.memory.KEPT_FREED", times)
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
        (4, {"exchange": ExchangeConfig("shm:32", overlap="on")}, "on, each of 4 workers holds 0.106 of 0.424 MB"),
        (4, {"exchange": ExchangeConfig("tree:32")}, "off, got strategy 'tree:32' for sharded updates; expected"),
        (
            4,
            {"optim": Optim("schedule_free_sgd"), "schedule": Schedule("constant")},
            "off, exchange.shard_update: got on with optimizer schedule_free_sgd",
        ),
        (2, {"optim": Optim("lamb")}, "on, each of 2 workers holds 0.262 of 0.424 MB"),
        (
            4,
            {"optim": Optim("lamb")},
            "off, rows of whole tensors would be filled up by 147 % of the params, above 68 %",
        ),
        (4, {"optim": Optim("sgd")}, "off, each worker would hold 0 MB of the optimizer's state less"),
        (4, {"optim": Optim("adam", ema=0.9)}, "on, each of 4 workers holds 0.159 of 0.636 MB"),
        (4, {"rule": RuleConfig("subgd")}, "off, rule.name: got subgd with exchange.shard_update on"),
        (
            4,
            {"exchange": ExchangeConfig("tree:32", shard_update="auto")},
            "off, got strategy 'tree:32' for sharded updates; expected",
        ),
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
