"""The picture of whole engines side by side: `python -m tools.side_by_side_picture`.

Drawn tokens a second against the time between two tokens of a request, a curve for each engine and
size of request, drawn from the table of `docs/benchmarks/side_by_side.md`. To be run when that
table changes.
"""

import pathlib
import re
import sys

from tools.svg import INK, LINE, document, dot, line, polyline, text, write

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "side_by_side.md"
PICTURE = DOCUMENT.with_name("side_by_side.svg")

SIZE, LEFT, RIGHT, TOP, BOTTOM = (720, 420), 72, 36, 56, 52
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
    width, height = SIZE

    def x_of(ms):
        return LEFT + ms / MOST_X * (width - LEFT - RIGHT)

    def y_of(rate):
        return height - BOTTOM - rate / MOST_Y * (height - TOP - BOTTOM)

    left, right, floor = x_of(0), x_of(MOST_X), y_of(0)
    parts = []
    for rate in range(0, MOST_Y + 1, STEP_Y):
        y = y_of(rate)
        parts += [line(left, y, right, y, LINE), text(left - 8, y + 4, f"{rate:,}", anchor="end")]
    parts += [text(x_of(ms), floor + 18, f"{ms}") for ms in range(0, MOST_X + 1, STEP_X)]
    parts.append(text((left + right) / 2, height - 10, "ms between two tokens, median"))
    middle = (floor + TOP) / 2
    turned = f' transform="rotate(-90 16 {middle:.1f})"'
    parts.append(text(16, middle, "drawn tokens a second, all requests", more=turned))
    for number, ((size, engine), points) in enumerate(curves.items()):
        colour, dashes = COLOURS[engine], DASHES[size]
        corners = [(x_of(ms), y_of(rate)) for _, ms, rate in points]
        parts.append(polyline(corners, colour).replace("/>", f"{dashes}/>"))
        for (at_a_time, _, _), (x, y) in zip(points, corners, strict=True):
            parts.append(dot(x, y, 4, colour))
            place = y + (18 if engine == "dsv4-jax" else -8)
            parts.append(text(x, place, f"{at_a_time}", fill=colour))
        column, row = divmod(number, 2)
        x, y = left + 12 + 330 * column, 18 + 20 * row
        parts.append(line(x, y - 4, x + 34, y - 4, colour, f' stroke-width="2"{dashes}'))
        parts.append(text(x + 42, y, f"{engine}, {size} tokens", anchor="start", fill=INK))
    said = "Drawn tokens a second against the time between tokens, of whole engines on one card"
    return document(SIZE, said, parts)


def main():
    return write(PICTURE, draw(read_table(DOCUMENT.read_text())))


if __name__ == "__main__":
    sys.exit(main())
