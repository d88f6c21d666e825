"""Lines on paper: a PNG of a few curves, drawn with Pillow."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

Points = Sequence[tuple[float, float]]
COLOURS = (
    "#1f5fa8",
    "#c8501e",
    "#2e8b57",
    "#8b3fa0",
    "#b8860b",
    "#d0307a",
    "#4a4a4a",
    "#20a0a8",
    "#7a5230",
    "#90b020",
    "#000000",
    "#f08080",
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, FONT = 900, 560, 90, 190, 50, 60, 15  # px


class Panel(NamedTuple):
    """One diagram: workers along x, in powers of two."""

    title: str
    y_name: str
    lines: Mapping[str, Points]
    log_y: bool = False


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Write the panels below one another."""
    image = Image.new("RGB", (WIDTH, HEIGHT * len(panels)), "white")
    for i, panel in enumerate(panels):
        draw_panel(ImageDraw.Draw(image), panel, i * HEIGHT)
    image.save(path, "PNG")


def draw_panel(pen: ImageDraw.ImageDraw, panel: Panel, top: int) -> None:
    """Frame, grid, lines and their names."""
    font = ImageFont.load_default(FONT)
    points = [point for line in panel.lines.values() for point in line]
    xs = [2.0**k for k in steps(math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points)))]
    ys = ticks([y for _, y in points], panel.log_y)
    across = scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT, True)
    up = scale(ys[0], ys[-1], top + HEIGHT - BOTTOM, top + TOP, panel.log_y)
    pen.text((LEFT, top + 15), panel.title, "black", font)
    pen.text((LEFT, top + HEIGHT - 25), "workers", "black", font)
    pen.text((5, top + TOP - 25), panel.y_name, "black", font)
    for x in xs:
        pen.line([(across(x), up(ys[0])), (across(x), up(ys[-1]))], "#dddddd")
        pen.text((across(x) - 8, up(ys[0]) + 6), f"{x:g}", "black", font)
    for y in ys:
        pen.line([(LEFT, up(y)), (WIDTH - RIGHT, up(y))], "#dddddd")
        pen.text((15, up(y) - 9), f"{y:g}", "black", font)
    for i, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        pen.line([(across(x), up(y)) for x, y in line], colour, 2)
        pen.text((WIDTH - RIGHT + 12, top + TOP + 20 * i), name, colour, font)


def scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    """The px of a value."""
    bend = math.log10 if log else float
    span = bend(high) - bend(low) or 1.0
    return lambda value: start + (bend(value) - bend(low)) / span * (end - start)


def steps(low: float, high: float) -> range:
    """Whole numbers around an interval."""
    return range(math.floor(low), math.ceil(high) + 1)


def ticks(values: Sequence[float], log: bool) -> list[float]:
    """Round numbers around the values: powers of ten, or five equal steps from 0."""
    if log:
        return [10.0**k for k in steps(math.log10(min(values)), math.log10(max(values)))]
    top = max(values) or 1.0
    unit = 10 ** math.floor(math.log10(top))
    step = next(unit * f for f in (0.2, 0.5, 1.0, 2.0) if unit * f * 5 >= top)
    return [step * i for i in range(6)]
