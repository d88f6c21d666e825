"""Charts as PNG files: lines over two logarithmic axes, and bars; each with a bound drawn in."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

WIDTH, LINES_HEIGHT, BAR_HEIGHT = 1100, 600, 30  # pixels
MARGIN, TOP = 90, 60
FINER = 2  # drawn this much larger, then reduced: edges get smooth
INK, FAINT, BOUND = "#222222", "#dddddd", "#d00000"
# Okabe and Ito's colours, told apart by most eyes; then darker ones.
COLOURS = "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #b8a900 #666666 #003a5c #7a5400 #004d38 #6b3a56".split()
UNITS = [(1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")]
Point = tuple[float, float]


class Lines(NamedTuple):
    """Named lines over logarithmic axes; all values > 0."""

    title: str
    x_unit: str
    y_unit: str
    series: Mapping[str, Sequence[Point]]
    bound: Sequence[Point]

    @property
    def height(self) -> int:
        """Pixels."""
        return LINES_HEIGHT

    def draw(self, pen: "Pen") -> None:
        """Axes with their decades, lines with their points, and the names."""
        points = [point for line in [*self.series.values(), self.bound] for point in line]
        x = log_scale([p[0] for p in points], MARGIN, WIDTH - 260)
        y = log_scale([p[1] for p in points], self.height - MARGIN, TOP)
        for value in decades([p[0] for p in points]):
            pen.line([(x(value), TOP), (x(value), self.height - MARGIN)], FAINT)
            pen.text((x(value), self.height - MARGIN + 8), short(value) + self.x_unit, "mt")
        for value in decades([p[1] for p in points]):
            pen.line([(MARGIN, y(value)), (WIDTH - 260, y(value))], FAINT)
            pen.text((MARGIN - 8, y(value)), short(value) + self.y_unit, "rm")
        for i, (name, line) in enumerate(self.series.items()):
            colour = COLOURS[i % len(COLOURS)]
            at = [(x(px), y(py)) for px, py in line]
            pen.line(at, colour, 2)
            for point in at:
                pen.dot(point, colour)
            pen.text((WIDTH - 240, TOP + 8 + 24 * i), name, "lm", colour)
        pen.dashes([(x(px), y(py)) for px, py in self.bound])
        if self.bound:
            pen.text((WIDTH - 240, TOP + 8 + 24 * len(self.series)), "- - bound", "lm", BOUND)
        pen.text((MARGIN, 18), self.title, "lt", INK, 18)


class Bars(NamedTuple):
    """Named bars from zero, with a whisker from quartile to quartile."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float, float, float]]  # name, median, quartiles
    bound: float | None

    @property
    def height(self) -> int:
        """Pixels."""
        return TOP + BAR_HEIGHT * len(self.bars) + 60

    def draw(self, pen: "Pen") -> None:
        """Bars from the top, and the bound across them."""
        left, right, bottom = 3 * MARGIN, WIDTH - 120, self.height - 50
        most = max([*(high for *_, high in self.bars), self.bound or 0.0]) or 1.0

        def x(value: float) -> float:
            return left + (right - left) * value / most

        for i, (name, middle, low, high) in enumerate(self.bars):
            y, colour = TOP + BAR_HEIGHT * (i + 0.5), COLOURS[i % len(COLOURS)]
            pen.box((left, y - 9), (x(middle), y + 9), colour)
            pen.line([(x(low), y), (x(high), y)], INK)
            pen.text((left - 8, y), name, "rm")
            pen.text((x(high) + 8, y), short(middle) + self.unit, "lm")
        pen.line([(left, TOP), (left, bottom)], INK)
        if self.bound is not None:
            pen.dashes([(x(self.bound), TOP), (x(self.bound), bottom)])
            pen.text((x(self.bound), bottom + 6), f"bound {short(self.bound)}{self.unit}", "mt", BOUND)
        pen.text((MARGIN, 18), self.title, "lt", INK, 18)


Panel = Lines | Bars


class Pen:
    """Draws one panel at its place in the picture."""

    def __init__(self, image: Image.Image, top: int) -> None:
        """Take the picture and the panel's upper edge."""
        self.canvas, self.top = ImageDraw.Draw(image), top

    def at(self, point: Point) -> Point:
        """A panel's pixel in the picture."""
        return FINER * point[0], FINER * (point[1] + self.top)

    def line(self, points: Sequence[Point], colour: str, width: int = 1) -> None:
        """A line through points."""
        if len(points) > 1:
            self.canvas.line([self.at(point) for point in points], colour, FINER * width, joint="curve")

    def dashes(self, points: Sequence[Point]) -> None:
        """The bound."""
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            count = max(1, round(math.hypot(x1 - x0, y1 - y0) / 14))
            for i in range(count):
                ends = [(x0 + (x1 - x0) * t, y0 + (y1 - y0) * t) for t in (i / count, (i + 0.6) / count)]
                self.line(ends, BOUND, 2)

    def dot(self, point: Point, colour: str) -> None:
        """A small disc."""
        self.canvas.circle(self.at(point), 4 * FINER, colour)

    def box(self, corner: Point, other: Point, colour: str) -> None:
        """A filled rectangle."""
        self.canvas.rectangle([self.at(corner), self.at(other)], colour)

    def text(self, point: Point, text: str, anchor: str, colour: str = INK, size: int = 14) -> None:
        """Text; the anchor is Pillow's, such as `lm`: left, middle."""
        font = ImageFont.load_default(FINER * size)
        self.canvas.text(self.at(point), text, colour, font, anchor)


def log_scale(values: Sequence[float], first: float, last: float) -> Callable[[float], float]:
    """From a value to a pixel; the least value is at `first`, the greatest at `last`."""
    low, high = math.log(min(values)), math.log(max(values))
    span = high - low or 1.0
    return lambda value: first + (last - first) * (math.log(value) - low) / span


def decades(values: Sequence[float]) -> list[float]:
    """Powers of ten within the values."""
    first, last = math.ceil(math.log10(min(values))), math.floor(math.log10(max(values)))
    return [10.0**k for k in range(first, last + 1)]


def short(value: float) -> str:
    """`1.5 m` for 0.0015: three digits and a decimal prefix."""
    scale, prefix = next(((s, p) for s, p in UNITS if value >= s), UNITS[-1])
    return f"{value / scale:.3g} {prefix}"


def save(panels: Sequence[Panel], path: str) -> None:
    """All panels, one under another, as a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    size = (WIDTH, sum(panel.height for panel in panels))
    image = Image.new("RGB", (FINER * size[0], FINER * size[1]), "white")
    top = 0
    for panel in panels:
        panel.draw(Pen(image, top))
        top += panel.height
    image.resize(size, Image.Resampling.LANCZOS).save(path, "PNG")
