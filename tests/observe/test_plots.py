"""Plots: what is drawn, where the legend lies, the files, and what is refused."""

import subprocess
import sys

import pytest

from jaxmpi.core.errors import UsageError
from jaxmpi.observe import plots
from jaxmpi.observe.plots import Bars, Lines, Quantity

SIZE, TIME, SHARE = Quantity("vector", "B"), Quantity("time", "s"), Quantity("efficiency", "%", base=None)
SIZES = [4.0 * 8**k for k in range(9)]


def lines(names: int) -> Lines:
    """So many strategies, each slower than the one before it, over a bound."""
    series = {f"strategy:{i}": [(x, (i + 2) * (1e-5 + 1e-9 * x)) for x in SIZES] for i in range(names)}
    return Lines("vectors", SIZE, TIME, series, [(x, 1e-9 * x) for x in SIZES])


def bars(names: int, most: float = 5e-3) -> Bars:
    """So many strategies; the last takes `most` s."""
    middles = [most / (names - i) for i in range(names)]
    return Bars("a tree", TIME, [(f"strategy:{i}", m, 0.9 * m, 1.2 * m) for i, m in enumerate(middles)], most / 20)


def test_every_line_and_bar_is_named():
    panels = [bars(15), lines(30), bars(2)]
    figure = plots.figure(panels)
    assert len(figure.axes) == len(panels)
    for axes, panel in zip(figure.axes, panels, strict=True):
        legend = axes.get_legend()
        assert legend is not None
        named = panel.series if isinstance(panel, Lines) else []
        assert [text.get_text() for text in legend.get_texts()] == [*named, "bound"]
        if isinstance(panel, Bars):
            assert [text.get_text() for text in axes.get_yticklabels()] == [name for name, *_ in panel.bars]


def test_an_axis_is_logarithmic_where_values_span_a_decade():
    near = Lines("near", SIZE, SHARE, {"a": [(10.0, 1.0), (99.0, 90.0)]})
    axes = plots.figure([lines(2), near, bars(2), bars(2)._replace(bound=None)]).axes
    assert [(a.get_xscale(), a.get_yscale()) for a in axes] == [
        ("log", "log"),
        ("linear", "linear"),
        ("log", "linear"),
        ("linear", "linear"),
    ]
    assert [a.get_xlim()[0] for a in axes[1::2]] == [0, 0]
    assert [a.get_xlabel() for a in axes] == ["vector (B)", "vector (B)", "time (s)", "time (s)"]


def test_a_bar_says_its_value_with_a_prefix_only_if_it_has_a_unit():
    values = [0.51538, 1.2, 60_965_224.0, 12.0]
    plain = Bars("ratios", Quantity("over training", base=None), [(str(v), v, v, v) for v in values])
    timed = Bars("times", TIME, [("fast", 0.005, 0.004, 0.006)])
    shown = [[text.get_text() for text in axes.texts] for axes in plots.figure([plain, timed]).axes]
    assert shown == [["0.515", "1.2", "60,965,224", "12"], ["5.00 ms"]]


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".PDF", b"%PDF-")])
def test_the_ending_says_the_format(ending, start, tmp_path):
    file = tmp_path / f"plot{ending}"
    plots.check_file(file)
    assert not file.exists()
    plots.save([lines(2), bars(2)], file)
    assert file.read_bytes().startswith(start)
    for name in ("plot.jpg", "plot", "absent/plot.png"):
        with pytest.raises(UsageError):
            plots.check_file(tmp_path / name)


def test_no_global_state_of_pyplot(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom jaxmpi.observe import plots\nloaded = 'matplotlib' in sys.modules\n"
        "size = plots.Quantity('size')\n"
        f"plots.save([plots.Lines('t', size, size, {{'a': [(1.0, 2.0)]}})], Path({str(tmp_path / 'a.png')!r}))\n"
        "print(loaded, 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert job.stdout.split() == ["False", "True", "False"], job.stderr
