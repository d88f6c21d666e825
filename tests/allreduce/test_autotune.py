"""The cost model beside what programs really send, and `auto` and `jaxmpi plan` without MPI.

On real ranks: tests/ranks/test_autotune_over_mpi.py and the runs of the trainer at the end.
"""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi.allreduce import autotune, cost_model, measuring
from jaxmpi.allreduce.algorithms import ALL, STRATEGIES, StrategySpec, parse
from jaxmpi.allreduce.algorithms.color_trees import PRICE
from jaxmpi.allreduce.algorithms.spec import Link, Net, turn
from jaxmpi.allreduce.api import exchange
from jaxmpi.allreduce.cost_model import Fit
from jaxmpi.allreduce.wires import WIRES, Wire
from jaxmpi.checkpoint import run_directory
from jaxmpi.checkpoint.manifests import seal_manifest
from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.base import SoloComm, add_rows
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.experiments.digits import experiment as DIGITS
from jaxmpi.runtime import compile_cache
from jaxmpi.tools import cli
from jaxmpi.trainer import build
from jaxmpi.trainer.plan import make_plan
from launching import ROOT

FREE = Link(0.0, 0.0)
CARDS = Net(8, 1, Link(1e-5, 1e-10), Link(1e-4, 4e-8))  # eight hosts, 25 MB/s


# ---------------------------------------------------------------- formulas


def sent(jaxpr, times: int = 1) -> Iterator[tuple[int, int]]:
    """(how often, bytes) of every message that a rank sends in a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            aval = equation.invars[0].aval
            yield times, aval.size * aval.dtype.itemsize
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                length = equation.params["length"] if equation.primitive.name == "scan" else 1
                yield from sent(inner, times * length)


def traffic(spelling: str, n: int, hosts: int, slots: int) -> list[tuple[int, int]]:
    """The messages of a strategy over so many hosts."""
    size = hosts * slots
    comm, strategy = AxisComm("w", size, tuple(rank // slots for rank in range(size))), parse(spelling)
    traced = jax.make_jaxpr(lambda x: strategy.spec.sum(x, comm, strategy.wire), axis_env=[("w", size)])(jnp.zeros(n))
    return list(sent(traced.jaxpr))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["asa", "ring", "tree", "root"])
def test_messages_and_bytes_are_those_of_the_program(algorithm, workers):
    """One rank a host, so that every message of the program is one round; n divides by all that cut it up."""
    n = 8 * 3 * 4 * PRICE
    messages = traffic(f"{algorithm}:32", n, workers, 1)
    count = cost_model.predict(Net(workers, 1, FREE, Link(1.0, 0.0)), n, algorithm)
    assert count == sum(times for times, _ in messages)
    size = cost_model.predict(Net(workers, 1, FREE, Link(0.0, 1.0)), n, algorithm)
    assert size == pytest.approx(sum(times * size for times, size in messages))


@pytest.mark.parametrize("wire", [*WIRES])
def test_messages_and_bytes_of_wires(wire):
    n = 8 * 4096
    messages = traffic(f"ring:{wire}", n, 8, 1)
    latency, volume = cost_model.parts(Net(8, 1, FREE, Link(1.0, 1.0)), n, f"ring:{wire}")
    assert latency == sum(times for times, _ in messages)
    assert volume == sum(times * size for times, size in messages)


@pytest.mark.parametrize("cross", ["ring", "tree", "color2"])
def test_a_hierarchy_sends_a_part_between_hosts_and_as_much_as_asa_inside(cross):
    hosts, slots, n = 4, 2, 4 * 2 * 4 * PRICE
    assert cost_model.predict(Net(hosts, slots, Link(1.0, 0.0), FREE), n, f"hier-{cross}") == 2 * (slots - 1)
    inside = cost_model.predict(Net(hosts, slots, Link(0.0, 1.0), FREE), n, f"hier-{cross}")
    assert inside == 2 * (slots - 1) / slots * 4 * n
    between = cost_model.predict(Net(hosts, slots, FREE, Link(0.0, 1.0)), n, f"hier-{cross}")
    alone = cost_model.predict(Net(hosts, 1, FREE, Link(0.0, 1.0)), n / slots, cross)
    assert between == pytest.approx(slots * alone, rel=1e-12)  # all ranks of a host at once, over one card


def test_every_strategy_has_a_price_and_nothing_is_sent_by_one_worker():
    assert all(row.seconds for row in STRATEGIES.values())
    one = CARDS._replace(hosts=1)
    assert {cost_model.predict(one, 1e6, name) for name in cost_model.candidates(CARDS, tuple(WIRES))} == {0.0}


def test_a_strategy_that_was_not_measured_gets_the_median_factors():
    floats, times = (1 << 20, 1 << 22), {"asa:32": 2.0, "ring:32": 3.0, "tree:32": 7.0}
    seconds = {k: {n: CARDS.call_s + f * cost_model.predict(CARDS, n, k) for n in floats} for k, f in times.items()}
    fits = measuring.Probe(CARDS, seconds).fits_of_all(["asa:32", "root:32"])
    assert [*fits["root:32"]] == pytest.approx([3, 3], rel=1e-4)
    assert [*fits["asa:32"]] == pytest.approx([2, 2], rel=1e-4)
    assert measuring.Probe(CARDS, {}).fits_of_all(["asa:32"]) == {}  # of prices that were given, formulas count


def two_bf16(x):
    """Each float as two of 16 bits, the second what the first leaves out."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def test_rows_of_a_users_own_are_exchanged_with_and_priced(monkeypatch):
    comm, x = AxisComm("w", 4), np.random.default_rng(0).standard_normal((4, 1000), np.float32)
    wire = Wire(two_bf16, lambda sent: sent[0].astype(jnp.float32) + sent[1].astype(jnp.float32))
    monkeypatch.setitem(WIRES, "two", wire)
    spec = StrategySpec(lambda x, comm, wire: add_rows(wire.decode(comm.allgather(wire.encode(x)))), ALL)
    monkeypatch.setitem(STRATEGIES, "gather", spec)
    for name in ("ring:two", "gather:two"):
        mean = jax.jit(jax.vmap(lambda row, name=name: exchange(row, name, comm=comm), axis_name="w"))(x)
        # Four encodings at most of sums up to 4 max |x|, each within 2^-16 of what is encoded, over 4.
        np.testing.assert_allclose(mean[0], x.mean(0), atol=4 * 2.0**-16 * np.abs(x).max())
    names = cost_model.candidates(CARDS, ("two",))
    assert "ring:two" in names
    assert "gather:two" not in names
    assert cost_model.predict(CARDS, 1e6, "ring:two") > cost_model.predict(CARDS, 1e6, "ring:bf16")
    with pytest.raises(UsageError, match="'gather' has no cost formula"):
        cost_model.predict(CARDS, 1e6, "gather:two")
    priced = spec._replace(seconds=lambda net, n, wire: net.workers * turn(net, n, wire, 1))
    monkeypatch.setitem(STRATEGIES, "gather", priced)
    assert "gather:two" in cost_model.candidates(CARDS, ("two",))
    assert cost_model.predict(CARDS, 1e6, "gather:two") > 0


# ---------------------------------------------------------------- measured factors


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.25, 8.0)])
def test_factors_are_found_again(factors):
    call_s = 0.01
    net = CARDS._replace(call_s=call_s)
    times = {}
    for n in (1 << 12, 1 << 20):
        latency, volume = cost_model.parts(net, n, "ring:16")
        times[n] = call_s + factors[0] * latency + factors[1] * volume
    assert cost_model.fit(net, "ring:16", times) == pytest.approx(factors, rel=1e-6)
    fits = {"ring:16": Fit(*factors)}
    assert cost_model.predict(net, 1 << 20, "ring:16", fits) == pytest.approx(times[1 << 20] - call_s)


def test_times_that_contradict_the_formula_give_one_factor():
    """More floats in less time: noise. Neither part may become negative."""
    latency, volume = cost_model.fit(CARDS, "ring:32", {1 << 12: 1.0, 1 << 20: 0.1})
    assert latency == volume > 0
    assert cost_model.fit(CARDS, "ring:32", {1 << 20: sum(cost_model.parts(CARDS, 1 << 20, "ring"))}) == pytest.approx(
        (1, 1)
    )


# ---------------------------------------------------------------- the choice


def probe(net: Net, factors: dict[str, float]) -> measuring.Probe:
    """As if strategies had taken so many times what the formulas say."""
    times = {k: {n: f * cost_model.predict(net, n, k) for n in (1 << 14, 1 << 20)} for k, f in factors.items()}
    return measuring.Probe(net, times)


def test_the_fastest_is_taken_and_mpis_own_sum_for_a_clear_gain_only():
    assert autotune.fastest({"shm:32": 1.0, "asa:32": 0.9, "ar:32": 0.88}) == "asa:32"
    assert autotune.fastest({"shm:32": 1.0, "asa:32": 0.9, "ar:32": 0.8}) == "ar:32"
    assert autotune.fastest({"ar:32": 1.0}) == "ar:32"


@pytest.mark.parametrize(
    ("hosts", "wires", "among", "expected"),
    [
        ((0, 0, 0), ("32",), (), ["shm:32", "asa:32", "ring:32", "ar:32"]),
        ((0, 0, 1, 1), ("32",), (), ["asa:32", "ring:32", "hier-ring:32", "tree:32"]),
        ((0, 0, 1), ("32", "8"), (), ["asa:8", "ring:8", "tree:8", "color4:8"]),
        ((0, 0), ("32",), ("ring", "asa", "pipering"), ["asa:32", "ring:32", "pipering:32"]),
    ],
)
def test_few_strategies_that_fit_are_timed(hosts, wires, among, expected):
    assert autotune.candidates(hosts, wires, among) == expected


def test_without_mpi_nothing_is_probed_and_the_default_taken():
    assert autotune.choose(SoloComm(), [5]).strategy == "asa:32"
    assert autotune.choose(AxisComm("w", 4), [5], "auto:16", None).strategy == "asa:16"
    x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    got, expected = (
        jax.vmap(lambda v, s=s: exchange(v, s, comm=AxisComm("w", 4)), axis_name="w")(x) for s in ("auto", "asa32")
    )
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("asked", ["auto:7", "automatic"])
def test_other_words_are_refused(asked):
    with pytest.raises(UsageError, match=r"unknown (wire|strategy)"):
        exchange(jnp.ones(3), asked, comm=SoloComm())


# ---------------------------------------------------------------- on disk


KEY = {"hosts": {"node0": 8}, "cores": 2.0}
SAVED = probe(CARDS._replace(codec_s_per_float={"32": 0.0, "16": 1e-9}), {"asa:32": 1.0, "ring:16": 1.3})


def save(key: dict[str, Any], probe: measuring.Probe) -> None:
    compile_cache.write_json("probes", key, measuring.as_json(probe))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("text", ["[]", "{", '{"key": {}}', ""])
def test_the_newest_probe_that_can_be_read_counts(text, cache):
    save(KEY, SAVED)
    assert measuring.newest() == (KEY, SAVED)
    compile_cache.json_file("probes", KEY | {"cores": 4.0}).write_text(text)
    assert measuring.newest() == (KEY, SAVED)


# ---------------------------------------------------------------- jaxmpi plan


GIVEN = ["--alpha-s", "1e-4", "--beta-s-per-byte", "4e-8", "--bytes", "24e6", "--step-s", "2"]


def run(*argv: str) -> None:
    cli.run(["plan", *argv])


def test_a_models_tree_counts_leaf_by_leaf(capsys):
    run(*GIVEN[:4], "--experiment", str(ROOT / "experiments" / "digits.py"))
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.endswith("given prices")
    assert heading.startswith("0.2 MB of gradients in 8 leaves")


def test_it_goes_by_the_newest_probe(cache, capsys):
    save(KEY, SAVED)
    run("--bytes", "24e6", "--wires", "32", "16")
    out = capsys.readouterr().out
    assert "probe of node0 x 8" in out
    assert "ring:16" in out or "tree:16" in out


def test_a_probe_of_one_host_tells_nothing_of_others(cache, capsys):
    save({"hosts": {"laptop": 6}}, probe(CARDS._replace(hosts=1, slots=6), {"asa:32": 1.0}))
    run("--bytes", "24e6")
    out = capsys.readouterr().out
    assert "probe of laptop x 6, on one host" in out
    shapes = [line.split()[:4] for line in out.splitlines() if line.split()[0].isdigit()]
    assert shapes == [["2", "1", "x", "2"], ["4", "1", "x", "4"], ["6", "1", "x", "6"]]
    with pytest.raises(UsageError, match="on one host there is nothing to predict for one rank"):
        run("--bytes", "24e6", "--slots", "1")


WRONG = [
    (GIVEN[:4], "--bytes --experiment is required"),
    (["--bytes", "24e6"], "no probe is kept on this machine; run it under a launcher"),
    (["--alpha-s", "1", "--bytes", "8"], "--alpha-s and --beta-s-per-byte together"),
    ([*GIVEN, "--overlap", "2"], "--overlap: got 2.0"),
    ([*GIVEN, "--slots", "0"], r"--slots: got \[0\]"),
    ([*GIVEN, "--bytes", "3"], "--bytes: got 3.0"),
    (["--bytes", "8", "--cores", "2", "--gamma-s-per-byte", "1e-10"], "gamma_s_per_byte, cores; give --alpha-s and"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_what_cannot_be_is_refused(argv, message, cache, no_launcher):
    with pytest.raises(UsageError, match=message):
        run(*argv)


# ---------------------------------------------------------------- in the trainer


@pytest.mark.parametrize(
    ("strategy", "hosts", "options", "goes_on"),
    [
        ("shm:32", (0, 0), {}, True),
        ("shm:32", (0, 1), {}, False),  # begun on one host
        ("shm:32", (0, 0), {"overlap": "on"}, False),
        ("hier-asa:16", (0, 0, 1), {}, False),
        ("hier-root:16", (0, 0, 1, 1), {"overlap": "on"}, False),
        ("hier-ring:16", (0, 1, 0, 1), {"overlap": "on"}, True),
        ("tree:32", (0, 1, 2), {"overlap": "on"}, False),
        ("ring:32", (0, 0, 1, 1), {"shard_update": "on", "overlap": "on"}, True),
        ("ar:32", (0, 0, 1, 1), {"shard_update": "on", "overlap": "on"}, False),
        ("ar:32", (0, 0, 1, 1), {"shard_update": "on"}, True),
        ("color4:32", (0, 0, 1, 1), {"shard_update": "on"}, False),
    ],
)
def test_a_choice_that_these_ranks_and_options_cannot_have_is_made_anew(
    strategy, hosts, options: Any, goes_on, monkeypatch
):
    monkeypatch.setattr(build, "shards_obstacle", lambda plan, name: "it has no halves" if name == "ar" else "")
    experiment = SimpleNamespace(exchange=ExchangeConfig(**options))
    plan: Any = SimpleNamespace(experiment=experiment, workers=SimpleNamespace(comm=AxisComm("w", len(hosts), hosts)))
    assert build.can_keep(plan, strategy) == goes_on


def manifest_of(exchange) -> str:
    extra = {"scaled_for": 1, "experiment": {"effective batch": 8}, "exchange": exchange}
    files = {"common.bin": [], "worker_00000.bin": []}
    return seal_manifest({"format": 2, "step": 4, "workers": 1, "files": files, "extra": extra})


@pytest.mark.parametrize(
    ("before", "asked", "goes_on"),
    [("off", "auto", "off"), ("off", "on", "on"), ("auto", "auto", "auto"), ("", "auto", "auto")],
)
def test_overlap_that_does_not_pay_stays_off_in_a_resumed_run(before, asked, goes_on, tmp_path):
    experiment = Experiment(exchange=ExchangeConfig("auto", overlap=asked), resume=True, run_dir=str(tmp_path))
    (tmp_path / "record.jsonl").touch()
    folder = tmp_path / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True)
    exchange = {"asked": "auto", "strategy": "asa:32", "bucket_bytes": None} | ({"overlap": before} if before else {})
    (folder / "manifest.json").write_text(manifest_of(exchange))
    settled = run_directory.stored_exchange(
        run_directory.read_stored_settings(experiment, "digits"), experiment.exchange
    )
    assert settled == {"strategy": "asa:32", "bucket_bytes": None, "overlap": goes_on}


@pytest.mark.parametrize(
    ("asked", "pays", "overlap", "strategy"),
    [("auto", True, "auto", "ring:32"), ("auto", False, "off", "shm:32"), ("on", False, "on", "ring:32")],
)
def test_auto_overlaps_where_the_probe_says_that_it_pays(asked, pays, overlap, strategy, monkeypatch):
    def choose(comm, sizes, asked, bucket_bytes, among=()):
        return autotune.AutotuneResult("ring:32" if among == ("ring",) else "shm:32", pays, "why")

    monkeypatch.setattr(build, "choose", choose)
    monkeypatch.setattr(build, "algorithms_in_c", lambda hosts: ("ring",))
    monkeypatch.setattr(build, "overlap_obstacle", lambda plan: "")
    monkeypatch.setattr(build.overlap, "resolve", lambda *args: (True, ""))
    workers = Workers(AxisComm("w", 2, (0, 1)), SoloProcesses(), (0,), None)
    plan = make_plan(dataclasses.replace(DIGITS, exchange=ExchangeConfig("auto", overlap=asked)), workers)
    settled = build.choose_exchange(plan, None)
    assert (settled.experiment.exchange.overlap, settled.strategy) == (overlap, strategy)
    assert ("overlap off" in settled.notes[-1]) == (overlap == "off")
