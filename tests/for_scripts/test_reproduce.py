"""The papers' tables by one command: what is run, read and written."""

import argparse
import csv
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxmpi.config import experiment_file
from launching import ROOT, run

sys.path.insert(0, str(ROOT / "scripts"))
papers = importlib.import_module("papers")
reproduce = importlib.import_module("reproduce")
language = importlib.import_module("bench_language")
BENCH = {
    "cases": [
        {
            "case": "alexnet",
            "ranks": 8,
            "rows": [
                {"by": "ar", "seconds": [3.0, 4.0, 9.0]},
                {"by": "asa32", "seconds": [2.0, 1.0, 2.0]},
                {"by": "asa16", "seconds": [1.0]},
            ],
        }
    ]
}


def theirs(name: str, *args: str) -> dict[str, float]:
    """Return what the paper says, with a command line's numbers of workers."""
    return reproduce.JOBS[name].theirs(reproduce.parse([name, *args]))


def step_of(name: str, seconds: float) -> str:
    """A file of zoo_steps.py."""
    return json.dumps({name: {"ranks": [{"seconds": [9.0, seconds]}]}})


def test_table_3_from_a_bench_and_steps():
    """5,120 images are 5 steps of 8 workers with 128 each: 5 x 4 s of exchange, and of training 40 or 5 x 8 s."""
    files = [json.dumps(BENCH), step_of("alexnet", 8.0), step_of("alexnet", 2.0)]
    ours = reproduce.JOBS["table3"].read([], files)
    assert (ours["alexnet, ar / asa32"], ours["alexnet, ar / asa16"]) == (2.0, 4.0)
    assert ours["alexnet-128b, training with 1 worker, s"] == 320.0
    assert ours["alexnet-128b, with 8, s"] == 40.0
    assert ours["alexnet-128b, ar, s"] == 20.0
    assert ours["alexnet-128b, ar, speed-up"] == pytest.approx(320 / 60)
    assert ours["alexnet-32b, asa16, s"] == 20.0
    rows = {row["quantity"]: row for row in reproduce.rows_of(theirs("table3"), ours)}
    assert rows["alexnet, ar / asa32"]["paper"] == pytest.approx(2.68)
    assert rows["googlenet-32b, asa32, speed-up"]["ours"] is None
    assert len(reproduce.JOBS["table3"].panels([], files)[0].bars) == 6


def test_table_3_with_another_number_of_workers_stands_alone():
    """The paper's seconds and speed-ups are those of 8; one worker's training and ratios of exchanges stay."""
    four = {"cases": [BENCH["cases"][0] | {"ranks": 4}]}
    files = [json.dumps(four), step_of("alexnet", 8.0), step_of("alexnet", 2.0)]
    ours = reproduce.JOBS["table3"].read([], files)
    for args in (["-n", "4"], ["--hosts", "4"]):
        paper = theirs("table3", *args)
        both = set(paper) & set(ours)
        assert "alexnet-128b, ar, speed-up" in ours
        assert both == {
            "alexnet, ar / asa32",
            "alexnet, ar / asa16",
            "alexnet-128b, training with 1 worker, s",
            "alexnet-32b, training with 1 worker, s",
        }
        assert not any("with 8" in name or "speed-up" in name for name in paper)
    assert [name for name, *_ in reproduce.JOBS["table3"].panels([], files)[0].bars] == [
        "ar, ours",
        "asa32, ours",
        "asa16, ours",
    ]


@pytest.mark.parametrize("name", ["speedup", "baidu", "synkhronos"])
def test_a_speed_up_needs_one_worker(name, tmp_path):
    with pytest.raises(SystemExit, match=r"--workers: got 2 4 8; expected 1 among them, whose speed is the base"):
        reproduce.main([name, "--show", "--out", str(tmp_path), "--workers", "2", "4", "8"])
    reproduce.main([name, "--show", "--out", str(tmp_path), "--workers", "4", "1"])


@pytest.mark.parametrize(
    ("name", "printed"),
    [("alexnet-128b, ar", 5.3), ("alexnet-32b, asa16", 5.7), ("googlenet-32b, ar", 7.1), ("vgg16-32b, asa32", 6.7)],
)
def test_the_papers_speed_ups_follow_from_its_seconds(name, printed):
    """Table 3 has both; one worker's training over training and exchange of eight."""
    assert theirs("table3")[f"{name}, speed-up"] == pytest.approx(printed, abs=0.06)


def record_of(model: str, local_batch: int, workers: int, strategy: str, rate: float) -> str:
    """A record of a run; its first step compiles."""
    of_run = {"model": model, "local_batch": local_batch, "exchange": {"strategy": strategy}}
    paces = [{"kind": "train", "images_per_s": pace} for pace in (1.0, rate, rate, rate + 1)]
    rows = [{"kind": "run", "workers": workers, "experiment": of_run}, *paces]
    return "\n".join(map(json.dumps, rows))


def test_speedups_of_records():
    """Each over one worker with as many images; one worker sends nothing, so it stands for 16 bits, too."""
    texts = [
        record_of("alexnet_tiny", 16, 1, "asa32", 10.0),
        record_of("alexnet_tiny", 16, 8, "asa32", 40.0),
        record_of("alexnet_tiny", 4, 1, "asa32", 5.0),
        record_of("alexnet_tiny", 4, 8, "asa32", 15.0),
        record_of("alexnet_tiny", 4, 8, "asa16", 20.0),
        record_of("googlenet", 4, 1, "asa32", 10.0),
        record_of("googlenet", 4, 2, "asa32", 18.0),
    ]
    ours = reproduce.JOBS["speedup"].read([], texts)
    assert ours == {
        "AlexNet, 8 workers of 128": 4.0,
        "AlexNet, 8 workers of 32": 3.0,
        "AlexNet, 8 workers of 32, 16 bits": 4.0,
        "GoogLeNet, 2 workers of 32": 1.8,
    }
    assert set(ours) <= set(theirs("speedup"))
    alexnet, googlenet = reproduce.JOBS["speedup"].panels([], texts)
    assert alexnet.series["32 images a worker, 16 bits, the paper"] == [(1.0, 1.0), (8.0, 5.7)]
    assert alexnet.series["128 images a worker, ours"] == [(1.0, 1.0), (8.0, 4.0)]
    assert googlenet.series["32 images a worker, the paper"] == [(1.0, 1.0), (2.0, 1.9), (4.0, 3.7), (8.0, 7.2)]
    assert "32 images a worker, 16 bits, ours" not in googlenet.series


def test_runs_of_a_speed_up():
    """Every row of the paper's table with the numbers of workers asked for, and one worker of each batch."""
    lines = reproduce.JOBS["speedup"].lines(reproduce.parse(["speedup", "--workers", "8", "1", "2"]))
    runs = [
        tuple(line[line.index(word) + 1] for word in ("-n", "--local-batch", "--exchange.strategy")) for line in lines
    ]
    models = [next(word for word in line if word.startswith("experiments/")) for line in lines]
    assert [run for run, model in zip(runs, models, strict=True) if "alexnet" in model] == [
        *[(n, "16", "asa32") for n in "128"],
        *[(n, "4", "asa32") for n in "18"],
        ("8", "4", "asa16"),
    ]
    assert [run for run, model in zip(runs, models, strict=True) if "googlenet" in model] == [
        *[(n, "4", "asa32") for n in "128"],
        ("8", "4", "asa16"),
    ]
    one = reproduce.parse(["speedup", "--models", "googlenet", "--workers", "1"])
    assert len(reproduce.JOBS["speedup"].lines(one)) == 1
    assert not any(name.startswith("AlexNet") for name in reproduce.JOBS["speedup"].theirs(one))


def runs_of(batch: str, errors: dict[tuple[str, str], list[float]]) -> str:
    """Lines of study.py: last errors of top-5 in percent by (workers, strategy), a seed each."""
    return "\n".join(
        json.dumps(
            {
                "cell": {"workers": workers, "local-batch": batch, "optim.lr": "0.01", "exchange.strategy": strategy},
                "seed": seed,
                "eval_top5": 1 - error / 100,
                "eval_top1": 1 - 10 * error / 100,
                "top5_curve": [[1.0, 50.0], [2.0, error]],
            }
        )
        for (workers, strategy), each in errors.items()
        for seed, error in enumerate(each)
    )


def test_errors_by_workers_and_points_lost():
    """AlexNet's 4 images a worker stand for the paper's 32; 16 bits cost 1 and 3 points, so 2 with an error of 1."""
    alexnet = runs_of("16", {("1", "asa32"): [2.0, 4.0], ("2", "asa32"): [3.0, 6.0]})
    small = runs_of("4", {("8", "asa32"): [4.0, 5.0], ("8", "asa16"): [5.0, 8.0]})
    googlenet = runs_of("8", {("1", "asa32"): [10.0]})
    files = [f"{alexnet}\n{small}", googlenet]
    ours = reproduce.JOBS["table1"].read([], files)
    assert ours["AlexNet, 2 workers of 128 at 0.01, top-5 error %"] == 4.5
    assert ours["AlexNet, 2 workers of 128 at 0.01, over 1 worker"] == 1.5
    assert ours["AlexNet, 2 workers of 128 at 0.01, top-5 error %, standard error"] == pytest.approx(1.5)
    assert ours["AlexNet, 2 workers of 128 at 0.01, top-1 error %"] == pytest.approx(45.0)
    assert ours["AlexNet, 2 workers of 128 at 0.01, top-1 error %, standard error"] == pytest.approx(15.0)
    # Both errors count in a ratio: 1.5 of 4.5, and 1 of 3.
    relative = ((1.5 / 4.5) ** 2 + (1 / 3) ** 2) ** 0.5
    of_ratio = ours["AlexNet, 2 workers of 128 at 0.01, over 1 worker, standard error"]
    assert of_ratio == pytest.approx(1.5 * relative)
    assert "GoogLeNet, 1 worker of 32 at 0.01, top-5 error %, standard error" not in ours  # of one seed nobody knows
    page = reproduce.page("table1", reproduce.JOBS["table1"], reproduce.rows_of(theirs("table1"), ours), [], "today")
    assert "| AlexNet, 2 workers of 128 at 0.01, top-5 error % | 19.8 | 4.5 ± 1.5 | 0.227 |" in page
    assert "| AlexNet, 2 workers of 128 at 0.01, top-1 error % |  | 45 ± 15 |  |" in page
    assert "standard error |" not in page
    assert ours["AlexNet, points of top-5 lost by 16 bits"] == pytest.approx(2.0)
    assert ours["AlexNet, points of top-5 lost by 16 bits, standard error"] == pytest.approx(1.0)
    assert ours["GoogLeNet, 1 worker of 32 at 0.01, top-5 error %"] == 10.0
    assert {name for name in theirs("table1") if name.startswith("AlexNet, 2 workers")} <= set(ours)
    figure4, _, by_workers = reproduce.JOBS["table1"].panels([], files)
    assert figure4.series["1 worker of 128 at 0.01"] == [(1.0, 50.0), (2.0, 3.0)]
    assert by_workers.series["AlexNet, ours"][:2] == [(1.0, 1.0), (2.0, 1.5)]
    assert by_workers.errors == {"AlexNet, ours": [0.0, of_ratio]}
    assert by_workers.series["AlexNet, the paper"][3] == (8.0, pytest.approx(20.7 / 19.8))


def test_a_seed_that_stayed_at_chance_counts_and_the_others_have_rows_of_their_own():
    """Top-1 errors are ten times these, and 90 % is chance: the second seed of 32 bits."""
    alexnet = runs_of("16", {("1", "asa32"): [2.0, 4.0]})
    googlenet = runs_of("8", {("1", "asa32"): [2.0, 2.0], ("8", "asa32"): [3.0, 9.0], ("8", "asa16"): [4.0, 5.0]})
    ours = reproduce.JOBS["table1"].read([], [alexnet, googlenet])
    cell = "GoogLeNet, 8 workers of 32 at 0.01"
    assert ours[f"{cell}, top-5 error %"] == 6.0
    assert ours[f"{cell}, seeds that learned, top-5 error %"] == 3.0
    assert ours[f"{cell}, seeds that learned, top-1 error %"] == pytest.approx(30.0)
    assert ours[f"{cell}, seeds that learned, over 1 worker"] == 1.5
    assert not [name for name in ours if "learned" in name and ("AlexNet" in name or "1 worker of" in name)]
    assert ours["GoogLeNet, points of top-5 lost by 16 bits"] == pytest.approx(1.0)  # of the first seed


def test_samples_of_a_language_model():
    """A step of 1 s alone; 2 hosts take 2 s each, an exchange 2 s more, 1 s more beside it, and 1 s as predicted."""
    steps = {
        1: {"behind": [1.0], "beside": [1.0], "alone": [1.0]},
        2: {"behind": [4.0], "beside": [3.0], "alone": [2.0]},
    }
    rows = language.rows_of(steps, {1: 0.0, 2: 1.0})
    ours = reproduce.JOBS["baidu"].read([], [json.dumps({"rows": rows})])
    assert ours["samples/s of a worker, most / 1"] == pytest.approx(1 / 2)
    assert ours["samples/s of a worker, most / 1, without overlap"] == pytest.approx(1 / 3)
    assert ours["2 hosts / 1, shared cores"] == 0.5
    assert ours["2 hosts / 1, shared cores, overlap"] == pytest.approx(2 / 3)
    assert ours["2 hosts, predicted / measured, own cores"] == 1.5
    panel = reproduce.JOBS["baidu"].panels([], [json.dumps({"rows": rows})])[0]
    assert panel.series["own cores, with overlap"] == [(1.0, 1.0), (2.0, 1.0)]


def test_the_paper_is_asked_for_as_many_workers():
    """Gibiansky's N / 2; of Ma et al. a row for each number of bits."""
    assert theirs("ring") == {"root / ring32, 2": 1, "root / ring32, 4": 2, "root / ring32, 8": 4}
    assert theirs("ring", "-n", "2") == {"root / ring32, 2": 1}
    assert theirs("ring", "--hosts", "6") == {"root / ring32, 2": 1, "root / ring32, 4": 2, "root / ring32, 6": 3}
    assert theirs("speedup")["GoogLeNet, 8 workers of 32"] == 7.2
    assert theirs("speedup")["GoogLeNet, 8 workers of 32, 16 bits"] == 7.3


def test_a_ring_by_ranks():
    """Each number of ranks has a bench of its own."""
    options = reproduce.parse(["ring", "--hosts", "6"])
    lines = reproduce.JOBS["ring"].lines(options)
    assert [line[line.index("mpirun") + 2] for line in lines] == ["2", "4", "6"]
    rows = [{"by": "root", "seconds": [6.0]}, {"by": "ring32", "seconds": [2.0]}]
    files = [json.dumps({"cases": [{"case": "6,000,000 floats", "ranks": n, "rows": rows}]}) for n in (2, 4)]
    assert reproduce.JOBS["ring"].read([], files) == {"root / ring32, 2": 3.0, "root / ring32, 4": 3.0}
    [panel] = reproduce.JOBS["ring"].panels([], files)
    assert panel.series["ours"] == [(2.0, 3.0), (4.0, 3.0)]
    assert panel.series["the article, N / 2: one rank receives"] == [(2.0, 1.0), (4.0, 2.0)]


SHUFFLE = """2 MB; medians of 1, 2 cores

| ranks | group | MB a worker | shuffle s | bare Alltoallv s | bare / shuffle |
|---|---|---|---|---|---|
| 2 | 1 | 40.0 | indices only | - | - |
| 2 | 2 | 20.0 | 0.400 | 0.800 | 2.00 |
| 8 | 2 | 20.0 | 0.500 | 0.800 | 1.60 |
| 8 | 8 | 5.0 | 0.200 | 0.300 | 1.50 |
"""
LOADED = """| source | images/s, batches of 224 px | images/s, compressed only |
|---|---|---|
| folder | 500 | 72706 |
| memory, packed at 256 px | 1,000 | 166499 |
| folder, reads take longer | 100 | 98 |
"""


def test_data_in_memory():
    assert reproduce.JOBS["dimd"].read([SHUFFLE, LOADED], []) == {
        "shuffle, 2 workers, bare Alltoallv / ours": 2.0,
        "shuffle, 8 workers, bare Alltoallv / ours": 1.5,
        "shuffle, 8 workers / 2": 0.5,
        "reading an epoch, memory / files": 0.5,
        "reading an epoch, memory / files with 10 ms a read": 0.1,
    }


def test_groups_of_a_shuffle():
    """A quarter of 8 workers to a group takes four times the memory, which the paper's layout says as well."""
    ours = reproduce.JOBS["groups"].read([SHUFFLE], [])
    assert ours == {
        "8 workers / 2, MB a worker": 0.25,
        "8 workers / 2, shuffle": 0.5,
        "8 workers, 4 groups / 1, MB a worker": 4.0,
        "8 workers, 4 groups / 1, shuffle": 2.5,
    }
    assert theirs("groups")["8 workers, 4 groups / 1, MB a worker"] == 4.0
    assert theirs("groups")["8 workers / 2, MB a worker"] == 0.25
    by_workers, sent, held, time = reproduce.JOBS["groups"].panels([SHUFFLE], [])
    assert by_workers.series == {"by the layout": [(2.0, 1.0), (8.0, 0.25)], "ours": [(2.0, 1.0), (8.0, 0.25)]}
    assert sent.series["bytes that leave a worker"] == [(2.0, 1.0), (8.0, 4 * 7 / 64)]
    assert held.series == {"by the layout": [(1.0, 1.0), (4.0, 4.0)], "ours": [(1.0, 1.0), (4.0, 4.0)]}
    assert time.series["ours"] == [(1.0, 1.0), (4.0, 2.5)]


EPOCHS = """| contender | epoch s | over the first |
|---|---|---|
| memory | 3.000 | 1.000 |
| packed | 4.000 | 1.333 |
| files | 5.000 | 1.667 |
| files with 10 ms a read | 12.000 | 4.000 |
"""
LAYOUTS = """| contender | epoch s | over the first |
|---|---|---|
| a process a device | 4.000 | 1.000 |
| a process for 2 | 3.000 | 0.750 |
"""


def test_epochs():
    assert reproduce.JOBS["epoch"].read([EPOCHS, EPOCHS.replace("3.000", "2.000")], []) == {
        "ResNet-50, an epoch, memory / files": 0.6,
        "ResNet-50, an epoch, memory / files with 10 ms a read": 0.25,
        "ResNet-50, an epoch, packed / files": 0.8,
        "GoogLeNetBN, an epoch, memory / files": 0.4,
        "GoogLeNetBN, an epoch, memory / files with 10 ms a read": 2 / 12,
        "GoogLeNetBN, an epoch, packed / files": 0.8,
    }
    assert list(reproduce.JOBS["devices"].read([LAYOUTS, LAYOUTS], []).values()) == [0.75, 0.75]
    both = LAYOUTS.replace("a process a device", "files and Allreduce").replace("a process for 2", "memory and four")
    assert reproduce.JOBS["together"].read([both, both], []) == dict.fromkeys(theirs("together"), 0.75)


RESNET = """| | ms an example | speedup | function | shuffle | straggler | all-reduce |
|---|---|---|---|---|---|---|
| plain JAX, 1 worker | 40.0 | 1.00 | 0.00 | 0.00 | 0.00 | 0.00 |
| weak, 1 | 41.0 | 0.98 | 39.00 | 0.10 | 0.00 | 0.00 |
| weak, 2 | 25.0 | 1.60 | 20.00 | 0.50 | 1.00 | 2.00 |
| strong, 2 | 32.0 | 1.25 | 20.00 | 0.50 | 1.00 | 2.00 |
"""


def test_scaling_of_functions():
    ours = reproduce.JOBS["synkhronos"].read([RESNET], [])
    assert ours["weak scaling, speed-up over workers"] == pytest.approx(0.8)
    assert ours["strong scaling, speed-up over workers"] == pytest.approx(0.625)
    assert ours["weak scaling, straggler of the time"] == pytest.approx(0.04)
    assert set(ours) == set(theirs("synkhronos"))
    lines, shares = reproduce.JOBS["synkhronos"].panels([RESNET], [])
    assert lines.series["weak, ours"] == [(1.0, 0.98), (2.0, 1.6)]
    assert lines.series["strong, ours"] == [(1.0, 0.98), (2.0, 1.25)]
    assert dict(bar[:2] for bar in shares.bars)["straggler, ours"] == pytest.approx(0.04)


@pytest.mark.slow  # tests/tools/test_cli.py counts the same
def test_the_models_are_those_of_the_papers(tmp_path, capsys):
    """Runs `python -m jaxmpi.models` for real."""
    reproduce.main(["table2", "--out", str(tmp_path)])
    folder = tmp_path / "table2"
    with (folder / "table2.csv").open() as file:
        rows = {row["quantity"]: row for row in csv.DictReader(file)}
    assert all(float(rows[name]["ours / paper"]) == 1.0 for name in theirs("table2"))
    assert (folder / "table2.png").stat().st_size > 5000
    assert "| alexnet, parameters | 60,965,224 | 60,965,224 | 1 |" in (folder / "table2.md").read_text()
    assert "-m jaxmpi.models" in capsys.readouterr().out


class Parsed(Exception):
    """A script has taken its command line, and is not to run."""


def parse_alone(monkeypatch, words: list[str]) -> None:
    """Run a line until its parser is content."""
    parse_args = argparse.ArgumentParser.parse_args

    def parsed(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Parsed

    is_module = words[0] == "-m"
    module = importlib.import_module(f"{words[1]}.__main__" if is_module else Path(words[0]).stem)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(sys, "argv", words[is_module:])
        with pytest.raises(Parsed):
            module.main()


@pytest.mark.parametrize("name", reproduce.JOBS)
@pytest.mark.parametrize("more", [(), ("--quick",), ("--hosts", "4")], ids=["whole", "quick", "hosts"])
def test_every_line_is_taken_by_its_script(name, more, tmp_path, capsys, monkeypatch):
    if "--hosts" in more and not reproduce.JOBS[name].over_hosts:
        pytest.skip("on one machine alone")
    reproduce.main([name, "--show", "--out", str(tmp_path), *more])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("+ ")]
    assert shown
    assert not any(sys.executable in line for line in shown)  # a page names no machine's paths
    assert ("--hosts" in more) == any("--rate 200mbit" in line for line in shown)
    for line in shown:
        words = shlex.split(line.rpartition("python ")[2])
        if words[:3] == ["-m", "jaxmpi.tools.cli", "train"]:
            chosen, _ = experiment_file.parse(words[5:])
            assert chosen.exchange.strategy.startswith("asa")
        else:
            parse_alone(monkeypatch, words)


def test_a_page_of_recorded_runs_says_of_which_days_and_commits_they_are():
    old, new = {"seed": 0}, {"seed": 1, "day": "2026-11-28", "commit": "0123456789+"}
    kept = ["\n".join(map(json.dumps, (old, new, new)))]
    assert reproduce.days_of(kept) == "2026-11-28 (2 runs at 01234567), before runs had a day (1 runs at no commit)"


def test_what_runs_on_one_machine_alone_says_so():
    with pytest.raises(SystemExit, match="--hosts: table2 runs on this machine alone; leave it out"):
        reproduce.main(["table2", "--show", "--hosts", "4"])


def line_of(code: str) -> Any:
    """A job that runs a small program and reads the number that it prints."""
    return papers.PaperTable(
        "A paper, Table 9",
        lambda o: [[sys.executable, "-c", code]],
        lambda printed, files: {"answer": float(printed[0])},
        lambda o: {"answer": 21.0},
        "Theirs was half.",
    )


def test_all_goes_on_past_one_that_cannot_run(tmp_path, monkeypatch, capsys):
    """Its page says why, the others are written, and the code tells that not all ran."""
    here = line_of("print(42)")
    jobs = {
        "first": here,
        "fails": line_of("import sys; sys.exit(3)"),
        "absent": here._replace(lines=lambda o: [[sys.executable, "scripts/of_another_part.py"]]),
        "alone": here._replace(over_hosts=False),
        "says nothing": line_of("print('nothing')"),
        "last": here,
    }
    monkeypatch.setattr(reproduce, "JOBS", jobs)
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["all", "--out", str(tmp_path), "--hosts", "2"])
    assert ended.value.code == 1
    pages = (tmp_path / "all.md").read_text()
    assert [line.partition(":")[0] for line in pages.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in jobs
    ]
    assert pages.count("| answer | 21 | 42 | 2 |") == 2
    assert "Did not run here: ended with code 3: python -c 'import sys; sys.exit(3)'" in pages
    assert "Did not run here: scripts/of_another_part.py: not there in this version" in pages
    assert "Did not run here: --hosts: alone runs on this machine alone; leave it out" in pages
    assert "printed what cannot be read: ValueError" in pages
    assert sorted(path.parent.name for path in tmp_path.rglob("*.csv")) == ["first", "last"]
    assert f"2 of 6 ran; {tmp_path / 'all.md'}" in capsys.readouterr().out


def test_all_goes_on_past_one_that_takes_too_long(tmp_path, monkeypatch):
    """Its processes end with it, or the next line would be timed beside them."""
    started = tmp_path / "started"
    code = (
        f"import subprocess as s; p = s.Popen(['sleep', '60']); open({str(started)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    jobs = {"sleeps": line_of(code), "last": line_of("print(42)")}
    monkeypatch.setattr(reproduce, "JOBS", jobs)
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["all", "--out", str(tmp_path), "--timeout-s", "4"])
    assert ended.value.code == 1
    pages = (tmp_path / "all.md").read_text()
    assert "Did not run here: took longer than 4 s (--timeout-s): python -c" in pages
    left = Path(f"/proc/{started.read_text()}/stat")
    assert not left.exists() or left.read_text().split()[2] == "Z"  # which nobody has waited for yet
    assert "| answer | 21 | 42 | 2 |" in pages


def test_all_ends_well_if_all_ran(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "JOBS", {"first": line_of("print(42)"), "last": line_of("print(21)")})
    reproduce.main(["all", "--out", str(tmp_path)])
    assert "2 of 2 ran" in capsys.readouterr().out
    assert "| answer | 21 | 21 | 1 |" in (tmp_path / "all.md").read_text()


@pytest.mark.e2e
def test_a_line_that_fails_is_an_error(tmp_path):
    args = ["table3", "-n", "0", "--out", str(tmp_path)]
    ended = run([sys.executable, "scripts/reproduce.py", *args], timeout_s=100, cwd=ROOT)
    assert ended.code != 0
    assert "reproduce: error: ended with code" in ended.out
    assert not list(Path(tmp_path).rglob("*.csv"))
