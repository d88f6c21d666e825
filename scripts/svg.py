"""Shapes of a picture as SVG, legible on light and dark pages."""

from typing import Any
from xml.sax.saxutils import escape

import numpy as np

WIDTH = 520  # a phone shows two thirds of it, which leaves text legible
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px } .head { font-weight: 600 } .inside { fill: #fff; font-weight: 600 }
.line { stroke: #2b8a57; stroke-width: 2 } .box { fill: #e5e7eb; stroke: #9ca3af }
.c0 { --c: #2f74c8 } .c1 { --c: #c4661f } .c2 { --c: #2b8a57 } .c3 { --c: #8e4fc0 } .c4 { --c: #c2394b }
.fill { fill: var(--c) } .edge { stroke: var(--c); stroke-width: 1.6; fill: none } .tip { fill: var(--c) }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .box { fill: #343a46; stroke: #6b7280 } .inside { fill: #111827 }
  .c0 { --c: #5b9bea } .c1 { --c: #e08a45 } .c2 { --c: #4fb380 } .c3 { --c: #b083e0 } .c4 { --c: #e8697a }
}
"""
Point = tuple[float, float]


class Picture:
    """Shapes of a picture, which is as high as they need."""

    def __init__(self, title: str) -> None:
        """Begin with nothing but a title, which screen readers say."""
        self.title, self.shapes, self.bottom = title, list[str](), 0.0

    def add(self, shape: str, bottom: float) -> None:
        """Add an element that reaches down to `bottom`."""
        self.shapes.append(shape)
        self.bottom = max(self.bottom, bottom)

    def text(self, at: Point, words: Any, kind: str = "small", anchor: str = "start") -> None:
        """Write one line; `at` is its anchor on the base line."""
        shape = f'<text x="{at[0]:g}" y="{at[1]:g}" class="{kind}" text-anchor="{anchor}">{escape(str(words))}</text>'
        self.add(shape, at[1] + 6)

    def box(self, at: Point, size: Point, kind: str = "box", words: Any = "", opacity: float = 1) -> None:
        """Draw a rectangle with a word in its middle; `kind` is `box` or `fill` and a colour."""
        (x, y), (width, height) = at, size
        shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"'
        self.add(f'{shape} fill-opacity="{opacity:.2f}"/>', y + height + 2)
        if words != "":
            is_full = "fill" in kind and opacity > 0.6
            self.text((x + width / 2, y + height / 2 + 4.5), words, "small inside" if is_full else "small", "middle")

    def arrow(self, begin: Point, end: Point, colour: int, kind: str) -> None:
        """Draw an arrow of a class that says what it stands for."""
        direction = np.subtract(end, begin) / np.hypot(*np.subtract(end, begin))
        side, foot = np.array([-direction[1], direction[0]]), np.array(end) - 8 * direction
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (end, foot + 4 * side, foot - 4 * side))
        path = f'<path d="M{begin[0]:.1f},{begin[1]:.1f} L{foot[0]:.1f},{foot[1]:.1f}" class="edge"/>'
        tip = f'<polygon points="{corners}" class="tip"/>'
        self.add(f'<g class="c{colour % 5} {kind}">{path}{tip}</g>', max(begin[1], end[1]) + 2)

    def svg(self) -> str:
        """The file."""
        size = f'viewBox="0 0 {WIDTH} {self.bottom:g}" width="{WIDTH}" height="{self.bottom:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        return "\n".join(
            [head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", *self.shapes, "</svg>\n"]
        )
