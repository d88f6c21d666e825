"""Line and bar plots in files.

Reports, the benchmark and the planner need plots of one style, and matplotlib is slow to import. No other module calls
matplotlib, and this one imports it at first use. A figure is a column of panels. An axis is logarithmic only if its
values span a factor of 10. Colours are the ten of Petroff 2021, which most eyes can distinguish.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
INSTALL = f"install it with {installing('matplotlib')}"
ENDINGS = (".png", ".svg", ".pdf")
WIDTH, LINES_HEIGHT, BAR_HEIGHT = 11.0, 5.5, 0.3  # inches
SHORT = 1000  # ratio of extremes up to which a logarithmic axis labels 2 and 5, too
MARKED = 20  # points of a long line that are marked
NAMES = 25  # in one column of a legend
STYLES = ("o-", "s:", "^-.")  # the next when the colours are used up; only the bound is dashed
BOUND: dict[str, Any] = {"color": "black", "linestyle": "--", "label": "bound"}
Point = tuple[float, float]


class Quantity(NamedTuple):
    """The quantity on an axis."""

    name: str
    unit: str = ""  # ticks get a prefix: 10 ms
    base: int | None = 10  # base of a logarithmic axis, used if values span a factor of 10; None: never
    low: float | None = 0.0  # start of an axis that is not logarithmic; None: near the least value


class Lines(NamedTuple):
    """Named lines; values > 0 if axes have bases."""

    title: str
    x: Quantity
    y: Quantity
    series: Mapping[str, Sequence[Point]]
    bound: Sequence[Point] = ()

    @property
    def height(self) -> float:
        """Inches."""
        return LINES_HEIGHT

    def draw(self, axes: "Axes") -> None:
        """Lines with their points, and the bound."""
        for i, (name, line) in enumerate(self.series.items()):
            every = max(1, len(line) // MARKED)
            look = STYLES[i // 10 % len(STYLES)]
            xs, ys = zip(*line, strict=True)
            axes.plot(xs, ys, look, color=colour(i), label=literal(name), markersize=4, markevery=every)
        if self.bound:
            axes.plot(*zip(*self.bound, strict=True), **BOUND)
        points = [point for line in [*self.series.values(), self.bound] for point in line]
        scale(axes, "x", self.x, [x for x, _ in points])
        scale(axes, "y", self.y, [y for _, y in points])


class Bars(NamedTuple):
    """Named bars, with whiskers from quartile to quartile; values > 0."""

    title: str
    x: Quantity
    bars: Sequence[tuple[str, float, float, float]]  # name, median, quartiles
    bound: float | None = None
    colours: int = 10  # that bars take in turn

    @property
    def height(self) -> float:
        """Inches."""
        return 1.5 + BAR_HEIGHT * len(self.bars)

    def draw(self, axes: "Axes") -> None:
        """Bars from the top with their values, and the bound across them."""
        from matplotlib.ticker import EngFormatter

        names, middles, lows, highs = zip(*self.bars, strict=True)
        whiskers = np.abs(np.array([lows, highs]) - middles)
        rows = range(len(names))
        drawn = axes.barh(rows, middles, color=[colour(i % self.colours) for i in rows], xerr=whiskers, capsize=3)
        # Without a unit three digits or a whole number, and no prefix: `515 m` suggests metres.
        shown = (
            EngFormatter(self.x.unit, places=2) if self.x.unit else lambda v: f"{v:,.0f}" if v >= 999.5 else f"{v:.3g}"
        )
        axes.bar_label(drawn, [shown(middle) for middle in middles], padding=4)
        if self.bound is not None:
            axes.axvline(self.bound, **BOUND)
        axes.set_yticks(rows, [*map(literal, names)])
        axes.invert_yaxis()
        axes.margins(x=0.12)  # for the last bar's value
        scale(axes, "x", self.x, [*lows, *highs, *([self.bound] if self.bound else [])])


Panel = Lines | Bars


def save(panels: Sequence[Panel], path: Path) -> None:
    """Write panels, one under another, in the format of the file's suffix.

    Raises:
        OSError: the file cannot be written.
    """
    figure(panels).savefig(path)


def check_file(path: Path) -> None:
    """Refuse a path of --plot that could not be written later.

    Raises:
        UsageError: an unknown ending, or no file can be there.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--plot: got {str(path)!r}; expected a name that ends in {', '.join(ENDINGS)}")
    if not is_installed():
        raise UsageError(f"--plot: matplotlib is missing; {INSTALL}")
    check_writable(path)


def is_installed() -> bool:
    """Return True if figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def figure(panels: Sequence[Panel]) -> "Figure":
    """The panels with titles, grids, and legends beside them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [panel.height for panel in panels]
    fig = Figure((WIDTH, sum(heights)), layout="constrained")
    FigureCanvasAgg(fig)
    rows = fig.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        panel.draw(axes)
        axes.set_title(literal(panel.title), loc="left")
        axes.grid(alpha=0.4)
        axes.set_axisbelow(True)
        count = len(axes.get_legend_handles_labels()[0])
        if count:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), ncols=-(-count // NAMES), fontsize="small")
    return fig


def scale(axes: "Axes", which: Literal["x", "y"], quantity: Quantity, values: Sequence[float]) -> None:
    """Label an axis, and make it logarithmic or set its start."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axes.set(**{f"{which}label": f"{quantity.name} ({quantity.unit})" if quantity.unit else quantity.name})
    if quantity.base and values and max(values) >= 10 * min(values):
        axes.set(**{f"{which}scale": "log"})
        is_short = quantity.base == 10 and max(values) < SHORT * min(values)
        axis.set_major_locator(LogLocator(quantity.base, (1.0, 2.0, 5.0) if is_short else (1.0,), numticks=15))
        axis.set_minor_formatter(NullFormatter())
    else:
        axes.set(**{f"{which}lim": (quantity.low, None)})
    axis.set_major_formatter(EngFormatter(quantity.unit) if quantity.unit else "{x:g}")


def colour(i: int) -> Any:
    """Colour of line or bar i, distinct to most eyes (Petroff 2021)."""
    from matplotlib import color_sequences

    return color_sequences["petroff10"][i % 10]


def literal(text: str) -> str:
    """A text that matplotlib can draw: no formula is read in it, and what cannot be encoded is `?`."""
    return text.encode(errors="replace").decode().replace("$", r"\$")
