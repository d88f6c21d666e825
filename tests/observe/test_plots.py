"""Plots: what is drawn, and without pyplot's global state."""

import subprocess
import sys

from jaxmpi.observe import plots
from jaxmpi.observe.plots import Lines


def lines(names: int, most: float = 90.0, *, is_log: bool = True) -> Lines:
    series = {f"strategy:{i}": [(x, (i + 1) * most * x / (10 * names)) for x in (1.0, 10.0)] for i in range(names)}
    return Lines("vectors", "step", "time", "s", is_log, series)


def test_every_line_is_named_and_an_axis_is_logarithmic_where_values_span_a_decade():
    panels = [lines(30), lines(2, is_log=False), lines(2)._replace(series={"a": [(1.0, 1.0), (2.0, 9.0)]})]
    axes = plots.figure(panels).axes
    assert [a.get_yscale() for a in axes] == ["log", "linear", "linear"]
    for drawn, panel in zip(axes, panels, strict=True):
        legend = drawn.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == [*panel.series]


def test_no_global_state_of_pyplot(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom jaxmpi.observe import plots\nloaded = 'matplotlib' in sys.modules\n"
        "panel = plots.Lines('t', 'x', 'y', '', False, {'a': [(1.0, 2.0)]})\n"
        f"plots.save([panel], Path({str(tmp_path / 'a.png')!r}))\n"
        "print(loaded, 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert job.stdout.split() == ["False", "True", "False"], job.stderr
