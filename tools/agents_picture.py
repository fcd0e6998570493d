"""The picture of snapshot policies in the documents: `python -m tools.agents_picture`.

Prompt tokens that were computed against the host's memory, a line for each policy, drawn from the
table of `docs/benchmarks/serving.md`. To be run when that table changes.
"""

import pathlib
import re
import sys

from tools.svg import INK, LINE, document, dot, line, polyline, text, write

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "serving.md"
PICTURE = DOCUMENT.with_name("agents.svg")

SIZE, LEFT, RIGHT, TOP, BOTTOM = (680, 360), 56, 200, 24, 52
COLOURS = ("#2b7a74", "#b4552d", "#5b5fa8", "#8a8d3b")


def read_table(document):
    """(shares of the host's memory, {policy: percent of prompt tokens that were computed})."""
    section = document.split("### Which snapshots are worth their bytes")[1].split("\n## ")[0]
    head, _, *rows = [line for line in section.splitlines() if line.startswith("| ")][:6]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in (head, *rows)]
    shares = [float(cell) for cell in cells[0][1:]]
    return shares, {
        name: [int(re.fullmatch(r"(\d+) %", cell)[1]) for cell in values]
        for name, *values in cells[1:]
    }


def draw(shares, policies, most=100):
    """The picture as text; arguments as of `read_table`."""
    width, height = SIZE
    left, right, floor = LEFT, width - RIGHT, height - BOTTOM

    def x_of(place):
        return left + place / (len(shares) - 1) * (right - left)

    def y_of(percent):
        return floor - percent / most * (floor - TOP)

    parts = []
    for percent in range(0, most + 1, 20):
        y = y_of(percent)
        parts += [
            line(left, y, right, y, LINE),
            text(left - 8, y + 4, f"{percent} %", anchor="end"),
        ]
    parts += [text(x_of(n), floor + 18, f"{share:g}") for n, share in enumerate(shares)]
    said = "the host's memory, in what blocks of all prefixes take"
    parts.append(text((left + right) / 2, height - 10, said))
    parts.append(text(left, TOP - 8, "prompt tokens that were computed", anchor="start", fill=INK))
    labels = sorted((values[-1], name) for name, values in policies.items())
    at = {name: max(y_of(value), 0) for value, name in labels}
    taken = []
    for (name, values), colour in zip(policies.items(), COLOURS, strict=False):
        points = [(x_of(n), y_of(value)) for n, value in enumerate(values)]
        parts += [polyline(points, colour), *(dot(x, y, 3.5, colour) for x, y in points)]
        y = at[name]
        while any(abs(y - other) < 16 for other in taken):
            y += 4
        taken.append(y)
        parts.append(text(right + 10, y + 4, name, anchor="start", fill=colour))
    said = "Prompt tokens that were computed by snapshot policy and host memory"
    return document(SIZE, said, parts)


def main():
    return write(PICTURE, draw(*read_table(DOCUMENT.read_text())))


if __name__ == "__main__":
    sys.exit(main())
