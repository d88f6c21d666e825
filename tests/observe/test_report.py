"""The page from a record, whatever the record is like. test_report_page.py opens it in a browser."""

import base64
import html.parser
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmpi.core.errors import UsageError
from jaxmpi.observe import report, report_page
from jaxmpi.observe.record_format import FORMAT, SOURCES
from jaxmpi.observe.record_reader import read
from jaxmpi.observe.recorder import Recorder
from jaxmpi.observe.report_data import BINS, Series, series_data
from jaxmpi.observe.step_timing import HEAD, LOCAL, summary
from jaxmpi.observe.terminal import Terminal
from jaxmpi.runtime.progress import Span

FACTS = {"workers": 4, "strategy": "ring:16", "experiment": {"rule": {"name": "gradients"}, "optim": {"lr": 0.1}}}


def write_run(folder: Path, lines: int = 30, lr: float = 0.1, ranks: int = 4) -> Path:
    """A run as the recorder writes it."""
    folder.mkdir()
    record = Recorder(folder, terminal=Terminal(), hosts=["node"] * ranks)
    experiment = {**FACTS["experiment"], "optim": {"lr": lr}}
    record.write("run", **{**FACTS, "experiment": experiment}, format=FORMAT, versions={"jax": "<0.10>"})
    rng = np.random.default_rng(0)
    for i in range(lines):
        rows = rng.uniform(0.1, 1.0, (ranks, HEAD + 10))
        rows[:, LOCAL.index("exposed")] = rows[:, HEAD:].sum(axis=1)
        rows[:, len(LOCAL)] = SOURCES.index("measured")
        place = {"step": 10 * i + 1, "total_steps": 10 * lines, "epoch": i / 10, "examples": 640 * (i + 1)}
        losses = {"loss": 2.0 / (i + 1), "lr": lr, "wait_s": 0.0, "skipped": 0, "gradient_norm": 1.0 / (i + 1)}
        noted = [Span("travel", f"bucket {b} of 3 (w<{b}>)", 0.0, 0.01 * b) for b in (1, 2, 3)]
        record.train(**place, **losses, anatomy=summary(rows, 10), noted=noted)
        if i % 10 == 9:
            top = {"eval_loss": 1.0, "eval_top1": 0.5 + i / 100, "eval_top5": 0.9}
            record.evaluation(step=10 * i + 1, epoch=i / 10, examples=640 * (i + 1), eval_count=360, **top)
    record.close()
    return folder


def write_lines(folder: Path, lines: list[dict]) -> Path:
    """A record of these lines."""
    folder.mkdir(exist_ok=True)
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def forged(folder: Path, kind: str, **fields: object) -> Path:
    """A run whose last lines of a kind have other fields."""
    path = write_run(folder, lines=10) / "record.jsonl"
    lines = [*map(json.loads, path.read_text().splitlines())]
    for i in [i for i, row in enumerate(lines) if row["kind"] == kind][-3:]:
        lines[i] = {**lines[i], **fields}
    return write_lines(folder, lines)


class Page(html.parser.HTMLParser):
    """The parts of a page that are checked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.sources, self.tags, self.data, self.is_data = [], [], [], {}, False
        self.feed(text)
        self.titles = [chart["title"] for chart in self.data["charts"]]

    def handle_starttag(self, tag: str, attrs: list) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if tag == "section" else []
        self.sources += [v for k, v in attributes.items() if k in ("src", "href", "xlink:href") and v]
        self.is_data = attributes.get("id") == "data"

    def handle_data(self, data: str) -> None:
        self.data = json.loads(data) if self.is_data else self.data

    def handle_endtag(self, tag: str) -> None:
        self.is_data = False


def test_the_page_of_two_runs_has_all_sections_and_needs_nothing_else(tmp_path):
    runs = [write_run(tmp_path / "a&b"), write_run(tmp_path / "second", lr=0.2)]
    text = report.write(runs, tmp_path / "out").read_text()
    page = Page(text)
    assert page.ids == ["overview", *report_page.SECTIONS, "differences", "configuration"]
    figures = ["Loss", "Accuracy, top-1", "Accuracy, top-5", "Speed, images/s", "Time of a step", "Goodput"]
    assert page.titles == [*figures, "Learning rate", "Norm of a worker's gradients"]
    assert all(source.startswith("data:") for source in page.sources), page.sources
    assert page.tags.count("script") == 3  # data, uPlot, and the page's own
    assert "a&amp;b" in text
    assert "<0.10>" not in text  # a version is text, not markup
    assert "79.00 % (best 79.00 %)" in text
    assert "0.2 (last 0.2)" in text  # the learning rate that came out
    differing = text.split('<section id="differences">')[1].split("</table>")[0]
    assert differing.count("<tr>") == 2  # the head, and one row
    assert "<th scope=row>experiment.optim.lr</th><td>0.1</td><td>0.2</td>" in differing


def test_the_page_of_several_runs_replaces_none_of_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [str(write_run(tmp_path / name)) for name in "ab"]
    report.main(runs[:1])
    report.main(runs)
    assert capsys.readouterr().out.splitlines() == [f"report: {runs[0]}/report/index.html", "report: report/index.html"]


def test_validation_sets_share_the_charts_of_loss_and_accuracy(tmp_path):
    figures = {"eval_clean_loss": 1.0, "eval_noisy_loss": 2.0, "eval_noisy_top1": 0.5, "eval_noisy_mae": 3.0}
    lines = [
        {"kind": "run", "validation_sets": ["clean", "noisy"]},
        {"kind": "train", "step": 1, "loss": 3.0},
        {"kind": "eval", "step": 1, **figures},
    ]
    page = Page(report.write([write_lines(tmp_path / "run", lines)], tmp_path / "out").read_text())
    drawn = {
        chart["title"]: [series["label"] for series, values in zip(chart["series"], shown, strict=True) if values]
        for chart, shown in zip(page.data["charts"], page.data["runs"][0]["charts"], strict=True)
    }
    assert drawn == {
        "Loss": ["training", "held out, clean", "held out, noisy"],
        "Accuracy, top-1": ["held out, noisy"],
        "noisy mae": ["held out"],
    }


def test_the_page_has_the_newest_samples_and_no_file_from_elsewhere(tmp_path):
    run = write_run(tmp_path / "run", lines=1)
    with Recorder(run, terminal=Terminal()) as record:
        record.sample(1, "words", "old")
        record.sample(2, "words", "<b>new</b>")
        record.sample(2, "eye", np.eye(8, dtype=bool))
        record.write("sample", step=3, name="far", file="../secret.png")
    (tmp_path / "secret.png").write_bytes(b"secret")
    text = report_page.page([read(run)])
    assert "words, step 2</figcaption><pre>&lt;b&gt;new&lt;/b&gt;</pre>" in text
    assert "old" not in text.partition('<section class="samples')[2].partition("</section>")[0]
    [picture_data] = re.findall(r'<img alt="eye, step 2" src="data:image/png;base64,([^"]+)">', text)
    with Image.open(io.BytesIO(base64.b64decode(picture_data))) as picture:
        np.testing.assert_array_equal(np.asarray(picture), 255 * np.eye(8))
    assert base64.b64encode(b"secret").decode() not in text
    assert "far, step 3" not in text


def test_figures_of_tasks_and_of_other_versions_have_a_chart_each(tmp_path):
    """The unit of a speed is the one that the record names."""
    row = {"kind": "train", "step": 1, "tokens_per_s": 500.0, "model_flops_per_s": 2e12, "mfu": 0.42, "queue_s": 0.5}
    maes = [{"kind": "eval", "step": k, "eval_loss": 1.0, "eval_mae": mae} for k, mae in enumerate((0.5, 0.25, 0.375))]
    write_lines(tmp_path, [*({**row, "step": step} for step in (1, 2, 3)), *maes])
    page = Page(text := report_page.page([read(tmp_path)]))
    speeds = ["Speed, tokens/s", "Model FLOP/s", "Model FLOPs utilisation"]
    assert page.titles == ["Loss", "mae", *speeds, "queue"]
    assert "<dt>tokens/s</dt><dd>500</dd>" in text
    assert "<dt>MFU</dt><dd>42.00 %</dd>" in text
    assert "<dd>0.375</dd><dd class=more>from 0.25 to 0.5</dd>" in text


# ---------------------------------------------------------------- records that are not as they should be


def test_a_record_that_is_being_written_is_read_to_its_last_whole_line(tmp_path):
    """Cut anywhere: what is read is the lines that are whole there, and nothing is called damaged."""
    run = write_run(tmp_path / "run", lines=3)
    text = (run / "record.jsonl").read_bytes()
    for end in range(text.index(b"\n") + 1, len(text), 197):
        (run / "record.jsonl").write_bytes(text[:end])
        *whole, last = text[:end].split(b"\n")
        whole += [last] if text[end : end + 1] == b"\n" else []
        record = read(run)
        assert len(record.train["step"]) == sum(line.startswith(b'{"kind": "train"') for line in whole)
        assert set(record.notes) <= {"no step yet"}


BEGIN = {"kind": "run", "format": FORMAT}
STEP = {"kind": "train", "step": 1, "loss": 0.5}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([json.dumps(BEGIN)], "no step yet"),
        ([json.dumps(BEGIN), json.dumps(STEP), "\xff\xfe not JSON", '["a list"]'], "1 lines are damaged"),
        ([json.dumps(BEGIN), json.dumps(STEP), "[" * 100_000], "1 lines are damaged"),
        (['{"kind": "run"}', json.dumps(STEP)], "no anatomy"),
        ([json.dumps(BEGIN | {"format": 99}), json.dumps(STEP), '{"kind": "new"}'], "format 99, newer"),
        ([*map(json.dumps, (BEGIN, STEP)), *2 * ['{"kind": "skipped", "step": 7}']], "2 steps were not finite"),
        ([*map(json.dumps, (BEGIN, STEP)), '{"kind": "rollback", "step": 6}'], "1 times back to a checkpoint"),
    ],
)
def test_what_is_missing_is_noted_on_the_page(lines, words, tmp_path):
    (tmp_path / "record.jsonl").write_text("".join(line + "\n" for line in lines), encoding="latin-1")
    record = read(tmp_path)
    assert len(record.notes) == 1
    assert words in record.notes[0]
    assert words in report_page.page([record])


ODD = [None, True, -1, 1e300, "x", [1], ["x", "y", "z", "w"], {"compute": ["x", {}]}]


@pytest.mark.parametrize("kind", ["run", "train", "eval", "exchange"])
def test_a_line_with_values_of_another_kind_is_read_for_what_it_has(kind, tmp_path):
    """As a later version may write it: every field in turn with every odd value."""
    lines = [*map(json.loads, (write_run(tmp_path / "run", lines=10) / "record.jsonl").read_text().splitlines())]
    which = [i for i, row in enumerate(lines) if row["kind"] == kind]
    for field in [*lines[which[0]]][1:]:
        for value in ODD:
            for i in which[-3:]:
                lines[i] = {**lines[i], field: value}
            record = read(write_lines(tmp_path, lines))
            assert report_page.page([record]).startswith("<!doctype html>")


def test_names_of_a_record_are_no_markup(tmp_path):
    evil = "--><script>alert(1)</script>"
    run = forged(tmp_path / "run", "exchange", buckets=[[evil, 0.1, 0.1]])
    second = forged(tmp_path / "second", "run", strategy=evil, **{evil: evil})
    text = report_page.page([read(second), read(run)])
    assert Page(text).tags.count("script") == 3
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("name", ["report", "report/index.html", "record.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_report_writes_through_no_link_and_waits_for_no_pipe(name, kind, tmp_path):
    run, elsewhere = write_lines(tmp_path / "run", [BEGIN, STEP]), tmp_path / "elsewhere"
    elsewhere.mkdir() if name == "report" else elsewhere.write_text("precious")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(elsewhere) if kind == "link" else os.mkfifo(run / name)
    with pytest.raises(UsageError):
        report.write([run], run / "report")
    assert os.listdir(elsewhere) == [] if name == "report" else elsewhere.read_text() == "precious"


@pytest.mark.parametrize("content", [None, b"", b'{"kind": "ru'])
def test_no_record_and_an_empty_one_are_refused_and_so_is_a_folder_that_cannot_be_written(tmp_path, content):
    if content is not None:
        (tmp_path / "record.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=r"record\.jsonl"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        report.write([write_lines(tmp_path / "run", [BEGIN, STEP])], tmp_path / "file" / "out")


def test_what_a_resumed_run_compiled_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", lines=4)
    lines = (run / "record.jsonl").read_text().splitlines()
    (run / "record.jsonl").write_text("\n".join([*lines, lines[0], *lines[1:3]]) + "\n")
    assert np.isnan(read(run).train["compute"]).tolist() == [True, False, False, False, True, False]


# ---------------------------------------------------------------- long ones


def test_a_long_record_keeps_its_peaks(tmp_path):
    """Every bin keeps its least and its greatest value, each at its step."""
    lines = 8_001
    losses = np.random.default_rng(0).uniform(1, 2, lines).round(5)
    losses[[777, 6_789]] = 99.125, 0.125
    rows = [{"kind": "train", "step": 3 * i, "loss": float(loss)} for i, loss in enumerate(losses)]
    record = read(write_lines(tmp_path, rows))
    drawn = series_data(record, Series("train", "loss"), BINS)
    assert drawn is not None
    steps, values = np.array(drawn["x"]["step"]), np.array(drawn["y"])
    assert 2 * BINS - 2 <= len(values) <= 2 * BINS + 2
    np.testing.assert_array_equal(values, losses[steps // 3])
    values_by_step = dict(zip(steps.tolist(), values.tolist(), strict=True))
    assert (values_by_step[3 * 777], values_by_step[3 * 6_789]) == (99.125, 0.125)
    means = dict(zip(steps.tolist(), drawn["mean"], strict=True))
    stretch = next(part for part in np.array_split(np.arange(lines), lines // 10) if 777 in part)
    assert means[3 * 777] == pytest.approx(losses[stretch].mean(), rel=0.02)  # stretches are of 10 lines, or 11


# ---------------------------------------------------------------- seeds and studies


def test_runs_that_differ_by_seed_only_are_one_group(tmp_path):
    runs = [
        write_lines(tmp_path / f"run{i}", [BEGIN | {"experiment": {"seed": i, "optim": {"lr": lr}}}, STEP])
        for i, lr in enumerate([1, 1, 2])
    ]
    records = [read(run) for run in runs]
    assert report_page.group_runs(records) == [("optim.lr 1", [0, 1]), ("run2", [2])]
    assert [group["runs"] for group in Page(report_page.page(records)).data["groups"]] == [[0, 1], [2]]
    assert Page(report_page.page(records[1:])).data["groups"] == []


def test_means_over_seeds_have_the_standard_error_that_a_sweep_prints(tmp_path):
    runs = [
        write_lines(
            tmp_path / f"run{i}",
            [BEGIN | {"experiment": {"seed": i}}, STEP, {"kind": "eval", "step": 1, "eval_loss": loss}],
        )
        for i, loss in enumerate([1.0, 2.0, 6.0])
    ]
    assert "3 ± 1.5" in report_page.page([read(run) for run in runs])  # sqrt(7 / 3), not sqrt(7)


def test_runs_of_one_seed_or_of_different_programs_stay_apart(tmp_path):
    facts = {"commit": "a1b2", "experiment_file": "f6", "versions": {"jax": "0.10"}, "backend": "cpu"}
    facts |= BEGIN | {"effective_batch": 64}
    first = read(write_lines(tmp_path / "first", [facts | {"experiment": {"seed": 0}}]))
    for seed, others in ((1, {}), (0, {}), (1, {"commit": "c3d4"}), (1, {"effective_batch": 128})):
        second = read(write_lines(tmp_path / "second", [facts | others | {"experiment": {"seed": seed}}]))
        expected = [[0, 1]] if seed and not others else [[0], [1]]
        assert [group.runs for group in report_page.group_runs([first, second])] == expected
