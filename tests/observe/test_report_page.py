"""The report's page in a browser: the mouse moves, clicks and drags over curves of a record whose values are known."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxmpi.observe import report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: uv sync")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
QUIET += ("--disable-component-update", "--disable-sync")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"),
]
STEPS = [*range(2, 402, 2)]
EVIL = "<script>alert('run')<"  # a folder's name; no slash can be in it
LOSSES = {EVIL: [round(8.5 / step, 5) for step in STEPS], "second": [round(9.5 / step, 5) for step in STEPS]}


def write_run(folder: Path, losses: list[float], steps: Sequence[int] = STEPS, **settings: Any) -> Path:
    """A record as the trainer's, short of what no test here looks at."""
    folder.mkdir()
    anatomy = {part: [0.001, 0.002, 0.003, 1] for part in ("data", "compute", "exchange", "sync", "other")}
    rows = [{"kind": "run", "format": 2, "workers": 2, "experiment": settings}]
    for step, loss in zip(steps, losses, strict=True):
        place = {"step": step, "epoch": step / 50, "elapsed_s": step / 10}
        times = {"step_s": 0.01, "own_s": [0.001, 0.002], "slowest": "rank 1 on </script><b>", "anatomy": anatomy}
        rows.append({"kind": "train", **place, "loss": loss, "images_per_s": 1e4, "lr": 0.1, **times})
        if step % 100 == 0:
            rows.append({"kind": "eval", **place, "eval_loss": 2 * loss, "eval_top1": 0.5})
    rows.append({"kind": "exchange", "step": steps[-1], "buckets": [["bucket 1 of 1 (w)", 0.002, 0.001]]})
    (folder / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=[*QUIET])
        yield opened
        opened.close()


def address_of(runs: list[Path], folder: Path) -> str:
    report.write(runs, folder)
    return (folder / "index.html").as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / name, losses, momentum=i) for i, (name, losses) in enumerate(LOSSES.items())]
    return address_of(runs, folder)


class Opened:
    """A page in the browser, with all that it complained of and asked for."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.wrong: list[str] = []
        self.page = browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **context})
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.check_request(request.url))
        self.page.goto(address)
        self.loss = self.page.locator("article", has=self.page.get_by_role("heading", name="Loss", exact=True))
        self.loss.locator(".u-over").wait_for()

    def check_request(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.wrong.append(url)

    def at(self, share: float, height: float = 0.5) -> tuple[float, float]:
        """A place within the plot of the loss."""
        box = self.loss.locator(".u-over").bounding_box()
        return box["x"] + share * box["width"], box["y"] + height * box["height"]

    def tip(self, share: float) -> tuple[int, dict[str, float]]:
        """The step under the mouse, and the values beside it."""
        self.page.mouse.move(*self.at(share))
        self.loss.locator(".tip:not([hidden])").wait_for()
        step = int(self.loss.locator(".tip b").inner_text().removeprefix("step "))
        rows = self.loss.locator(".tip div").all()
        return step, {row.locator(".name").inner_text(): float(row.locator(".value").inner_text()) for row in rows}

    def span(self) -> tuple[int, int]:
        """Steps at the left and the right end of the axis."""
        return self.tip(0.0005)[0], self.tip(0.9995)[0]

    def close(self) -> None:
        self.page.context.close()
        assert self.wrong == []


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Opened]:
    page = Opened(browser, address)
    yield page
    page.close()


def test_the_mouse_reads_values_of_the_record(opened):
    """Under the cursor are all runs at the same step; nothing is asked of the network, no name of a run is run."""
    for share in (0.3, 0.5, 0.81):
        step, values = opened.tip(share)
        assert abs(step - share * 400) < 4
        place = STEPS.index(step)
        held_out = min(range(100, 401, 100), key=lambda at: abs(at - step))
        for name, losses in LOSSES.items():
            assert values[f"{name}, training"] == losses[place]
            assert values[f"{name}, held out"] == pytest.approx(2 * losses[STEPS.index(held_out)])
    assert opened.page.locator("script").count() == 3
    assert opened.page.locator(".run span", has_text=EVIL).count() == 1


def test_a_click_in_the_legend_hides_a_run_and_shows_it_again(opened):
    chip = opened.page.locator(".legend .run", has_text="second")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert {name.rpartition(",")[0] for name in opened.tip(0.5)[1]} == {EVIL}
    opened.page.keyboard.press("Space")  # the button still has the focus
    assert len(opened.tip(0.5)[1]) == 4
    opened.loss.get_by_role("button", name="held out").click()
    assert {name.rpartition(", ")[2] for name in opened.tip(0.5)[1]} == {"training"}


def test_lines_of_several_runs_have_the_colours_of_the_runs_and_dashes_by_validation_set(browser, tmp_path):
    runs = [write_run(tmp_path / name, losses) for name, losses in zip("ab", LOSSES.values(), strict=True)]
    for run in runs:
        evaluation = {"kind": "eval", "step": 400, "eval_clean_loss": 1.0, "eval_noisy_loss": 2.0}
        rows = [{"kind": "run", "format": 2, "validation_sets": ["clean", "noisy"]}, evaluation]
        with (run / "record.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    page = Opened(browser, address_of(runs, tmp_path / "page"))
    page.tip(0.99)
    looks = {}
    for row in page.loss.locator(".tip div").all():
        run, _, series = row.locator(".name").inner_text().partition(", ")
        swatch = row.locator(".swatch")
        looks[run, series] = swatch.get_attribute("style"), swatch.get_attribute("class")
    colours = [chip.get_attribute("style") for chip in page.page.locator(".legend .run .swatch").all()]
    assert {(run, colour) for (run, _), (colour, _) in looks.items()} == set(zip("ab", colours, strict=True))
    series = {name: kind for (_, name), (_, kind) in looks.items()}
    assert len(set(series.values())) == len(series) == 3
    page.close()


def test_dragging_zooms_and_a_double_click_shows_all_again(opened):
    before = opened.span()
    assert before == (2, 400)
    opened.page.mouse.move(*opened.at(0.25))
    opened.page.mouse.down()
    opened.page.mouse.move(*opened.at(0.5), steps=5)
    opened.page.mouse.up()
    first, last = opened.span()
    assert 95 <= first <= 106
    assert 196 <= last <= 206
    opened.loss.get_by_role("button", name="Logarithmic axis").click()
    assert opened.span() == (first, last)
    opened.page.mouse.dblclick(*opened.at(0.5))
    assert opened.span() == before
