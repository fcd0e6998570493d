"""The picture of whole engines side by side: `python -m tools.side_by_side_picture`.

Drawn tokens a second against the time between two tokens of a request, a curve for each engine and
size of request, drawn from the table of `docs/benchmarks/side_by_side.md`. To be run when that
table changes.
"""

import pathlib
import re
import sys

from tools.svg import INK, Plot, axes, document, dot, line, polyline, text, write

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "side_by_side.md"
PICTURE = DOCUMENT.with_name("side_by_side.svg")

PLOT = Plot((720, 420), left=72, right=36, top=56, bottom=52)
MOST_X, STEP_X, MOST_Y, STEP_Y = 35, 5, 2000, 250
COLOURS = {"vLLM": "#b3541e", "dsv4-jax": "#2b7a74"}
DASHES = {"512 + 512": "", "8,192 + 1,024": ' stroke-dasharray="6 4"'}


def read_table(document):
    """{(size of a request, engine): [(at a time, ms between tokens, drawn tokens a second)]}."""
    section = document.split("## One run")[1].split("\n## ")[0].split("\n\n")[1]
    curves = {}
    for row in section.splitlines()[2:]:
        load, drawn, _, between, *_ = (cell.strip() for cell in row.strip("| ").split(" | "))
        at_a_time, size = load.split(", ", 1)
        rates = re.split(r", (?=\d)", drawn)
        for engine, rate, ms in zip(COLOURS, rates, between.split(", "), strict=True):
            point = int(at_a_time), float(ms), int(rate.replace(",", ""))
            curves.setdefault((size, engine), []).append(point)
    return curves


def draw(curves):
    """The picture as text; curves as of `read_table`."""

    def x_of(ms):
        return PLOT.x_of(ms / MOST_X)

    def y_of(rate):
        return PLOT.y_of(rate / MOST_Y)

    parts = axes(
        PLOT,
        most=MOST_Y,
        step=STEP_Y,
        ticks=[(x_of(ms), f"{ms}") for ms in range(0, MOST_X + 1, STEP_X)],
        below="ms between two tokens, median",
        beside="drawn tokens a second, all requests",
    )
    for number, ((size, engine), points) in enumerate(curves.items()):
        colour, dashes = COLOURS[engine], DASHES[size]
        corners = [(x_of(ms), y_of(rate)) for _, ms, rate in points]
        parts.append(polyline(corners, colour).replace("/>", f"{dashes}/>"))
        for (at_a_time, _, _), (x, y) in zip(points, corners, strict=True):
            parts.append(dot(x, y, 4, colour))
            place = y + (18 if engine == "dsv4-jax" else -8)
            parts.append(text(x, place, f"{at_a_time}", fill=colour))
        column, row = divmod(number, 2)
        x, y = PLOT.left + 12 + 330 * column, 18 + 20 * row
        parts.append(line(x, y - 4, x + 34, y - 4, colour, f' stroke-width="2"{dashes}'))
        parts.append(text(x + 42, y, f"{engine}, {size} tokens", anchor="start", fill=INK))
    said = "Drawn tokens a second against the time between tokens, of whole engines on one card"
    return document(PLOT.size, said, parts)


def main():
    return write(PICTURE, draw(read_table(DOCUMENT.read_text())))


if __name__ == "__main__":
    sys.exit(main())
