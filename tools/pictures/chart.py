"""Small charts as SVG, in the colours of `pipe.trace_svg()`: areas, lines and lanes over one horizontal axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

BLUE, ORANGE, TEAL, GREEN, GREY, RED, VIOLET = (
    "#4c78a8",
    "#d97736",
    "#2d9596",
    "#74a042",
    "#9aa5b1",
    "#c0392b",
    "#7d5ba6",
)
STYLE = """text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#3e4c59}
.title{font-size:15px;font-weight:bold;fill:#1f2933}.axis{font-size:11px;fill:#7b8794}
.middle{text-anchor:middle}.end{text-anchor:end}.on{fill:#ffffff;font-size:11px;text-anchor:middle}"""
RIGHT, TOP, BOTTOM, WIDTH = 20, 78, 44, 760


def ticks(end: float, wanted: int = 6) -> list[float]:
    """Round numbers from 0 to `end`."""
    rough = end / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * i for i in range(int(end / step + 1e-9) + 1)]


class Chart:
    """`x_end` and `y_end` are the largest values; without `y_end` the chart has lanes instead of a vertical axis."""

    def __init__(
        self,
        title: str,
        x_label: str,
        x_end: float,
        *,
        y_label: str = "",
        y_end: float | None = None,
        height: float = 240,
        left: float = 70,
        x_ticks: Mapping[float, str] | None = None,
    ) -> None:
        self._title, self._x_label, self._x_end = title, x_label, x_end
        self._y_label, self._y_end, self._height = y_label, y_end, height
        self._left = left  # room for the lanes' names
        self._x_ticks = x_ticks or {value: f"{value:g}" for value in ticks(x_end)}
        self._body: list[str] = []
        self._keys: list[tuple[str, str]] = []
        self._lanes: dict[str, float] = {}

    def x(self, value: float) -> float:
        return self._left + (WIDTH - self._left - RIGHT) * value / self._x_end

    def y(self, value: float) -> float:
        assert self._y_end is not None
        return TOP + self._height * (1 - value / self._y_end)

    def key(self, name: str, colour: str) -> None:
        if name and (name, colour) not in self._keys:
            self._keys.append((name, colour))

    def area(
        self,
        xs: Sequence[float],
        lows: Sequence[float],
        highs: Sequence[float],
        colour: str,
        name: str = "",
    ) -> None:
        """Between two curves of steps: a value holds until the next."""
        self.key(name, colour)
        points = _stairs(xs, highs) + _stairs(xs, lows)[::-1]
        path = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)
        self._body.append(f'<polygon points="{path}" fill="{colour}"/>')

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        colour: str,
        name: str = "",
        *,
        dashed: bool = False,
        marks: bool = False,
    ) -> None:
        self.key(name, colour)
        path = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in zip(xs, ys, strict=True))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        if marks:
            self._body += [
                f'<circle cx="{self.x(a):.1f}" cy="{self.y(b):.1f}" r="3" fill="{colour}"/>'
                for a, b in zip(xs, ys, strict=True)
            ]

    def stairs(self, xs: Sequence[float], ys: Sequence[float], colour: str, name: str = "") -> None:
        self.line(*zip(*_stairs(xs, ys), strict=True), colour, name)

    def lane(self, name: str) -> None:
        """A row, below the ones that there are."""
        self._lanes[name] = TOP + 36 * len(self._lanes)
        top = self._lanes[name]
        self._body.append(
            f'<rect x="{self._left}" y="{top}" width="{WIDTH - self._left - RIGHT}" height="26" fill="#eef1f4"/>'
            f'<text x="{self._left - 8}" y="{top + 17}" class="end">{escape(name)}</text>'
        )

    def bar(
        self, lane: str, begin: float, end: float, colour: str, name: str = "", word: str = ""
    ) -> None:
        self.key(name, colour)
        left, width = self.x(begin), max(self.x(end) - self.x(begin), 1.5)
        top = self._lanes[lane]
        self._body.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="26" fill="{colour}" '
            f'stroke="#ffffff"><title>{escape(name or word)}: {end - begin:.3g}</title></rect>'
        )
        if word and width > 7 * len(word):
            self._body.append(
                f'<text x="{left + width / 2:.1f}" y="{top + 17}" class="on">{escape(word)}</text>'
            )

    def mark(self, at: float, text: str, colour: str = RED) -> None:
        """A vertical line with its text above, to the left of it where there is no room to the right."""
        x, bottom = self.x(at), TOP + self._inner_height()
        side = "end" if x + 6.4 * len(text) > WIDTH - RIGHT else ""
        self._body.append(
            f'<line x1="{x:.1f}" y1="{TOP - 18}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}" '
            f'stroke-width="1.5" stroke-dasharray="3 3"/><text x="{x + (-5 if side else 5):.1f}" '
            f'y="{TOP - 8}" class="{side}" style="fill:{colour}">{escape(text)}</text>'
        )

    def level(self, at: float, text: str, colour: str = RED) -> None:
        """A horizontal line over the whole width."""
        self.line([0, self._x_end], [at, at], colour, dashed=True)
        self._body.append(
            f'<text x="{WIDTH - RIGHT - 4}" y="{self.y(at) - 5:.1f}" class="end" '
            f'style="fill:{colour}">{escape(text)}</text>'
        )

    def _inner_height(self) -> float:
        return self._height if self._y_end is not None else 36 * len(self._lanes) - 10

    def svg(self) -> str:
        height = TOP + self._inner_height() + BOTTOM
        bottom = TOP + self._inner_height()
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
            f'<text x="12" y="24" class="title">{escape(self._title)}</text>',
        ]
        x = 12.0
        for name, colour in self._keys:
            head.append(
                f'<rect x="{x:.1f}" y="36" width="12" height="12" rx="2" fill="{colour}"/>'
                f'<text x="{x + 17:.1f}" y="46">{escape(name)}</text>'
            )
            x += 36 + 6.4 * len(name)
        axes = []
        for value, text in self._x_ticks.items():
            at = self.x(value)
            axes.append(
                f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom + 4}" stroke="#d3dae2"/>'
                f'<text x="{at:.1f}" y="{bottom + 18}" class="axis middle">{escape(text)}</text>'
            )
        axes.append(
            f'<text x="{WIDTH / 2:g}" y="{height - 8:g}" class="axis middle">{escape(self._x_label)}</text>'
        )
        for value in ticks(self._y_end, 5) if self._y_end is not None else []:
            at = self.y(value)
            axes.append(
                f'<line x1="{self._left - 4}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#d3dae2"/>'
                f'<text x="{self._left - 8}" y="{at + 4:.1f}" class="axis end">{value:g}</text>'
            )
        if self._y_label:
            axes.append(
                f'<text x="16" y="{TOP + self._height / 2:g}" class="axis middle" '
                f'transform="rotate(-90 16 {TOP + self._height / 2:g})">{escape(self._y_label)}</text>'
            )
        return "\n".join([*head, *axes, *self._body, "</svg>", ""])


def _stairs(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    points = [(xs[0], ys[0])]
    for i in range(1, len(xs)):
        points += [(xs[i], ys[i - 1]), (xs[i], ys[i])]
    return points
