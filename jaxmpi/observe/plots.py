"""Line plots in a file, for a report.

matplotlib is slow to import. No other module calls it, and this one imports it at first use. A figure is a column of
panels. An axis is logarithmic only if its values span a factor of 10. Colours are the ten of Petroff 2021, which most
eyes can distinguish.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxmpi.core.env import installing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
INSTALL = f"install it with {installing('matplotlib')}"
WIDTH, HEIGHT = 11.0, 5.5  # inches
MARKED = 20  # points of a long line that are marked
NAMES = 25  # in one column of a legend
STYLES = ("o-", "s:", "^-.")  # the next when the colours are used up


class Lines(NamedTuple):
    """A panel of named lines."""

    title: str
    x: str
    y: str
    unit: str  # of y, whose ticks get a prefix: 10 ms
    is_log: bool  # if all y are > 0 and span a factor of 10
    series: Mapping[str, Sequence[tuple[float, float]]]


def is_installed() -> bool:
    """Return True if figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def save(panels: Sequence[Lines], path: Path) -> None:
    """Write panels, one under another, in the format of the file's suffix.

    Raises:
        OSError: the file cannot be written.
    """
    figure(panels).savefig(path)


def figure(panels: Sequence[Lines]) -> "Figure":
    """The panels with titles, grids, and legends beside them."""
    from matplotlib import color_sequences
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    colours = color_sequences["petroff10"]
    fig = Figure((WIDTH, HEIGHT * len(panels)), layout="constrained")
    FigureCanvasAgg(fig)
    for axes, panel in zip(fig.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for i, (name, line) in enumerate(panel.series.items()):
            xs, ys = zip(*line, strict=True)
            look, every = STYLES[i // 10 % len(STYLES)], max(1, len(line) // MARKED)
            axes.plot(xs, ys, look, color=colours[i % 10], label=literal(name), markersize=4, markevery=every)
        values = [y for line in panel.series.values() for _, y in line]
        if panel.is_log and 0 < 10 * min(values) <= max(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0), numticks=15))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(EngFormatter(panel.unit) if panel.unit else "{x:g}")
        axes.set(xlabel=panel.x, ylabel=literal(f"{panel.y} ({panel.unit})" if panel.unit else panel.y))
        axes.set_title(literal(panel.title), loc="left")
        axes.grid(alpha=0.4)
        columns = -(-len(panel.series) // NAMES)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), ncols=columns, fontsize="small")
    return fig


def literal(text: str) -> str:
    """A text that matplotlib can draw: no formula is read in it, and what cannot be encoded is `?`."""
    return text.encode(errors="replace").decode().replace("$", r"\$")
