"""The picture of snapshot policies in the documents: `python -m tools.agents_picture`.

Prompt tokens that were computed against the host's memory, a line for each policy, drawn from the
table of `docs/benchmarks/serving.md`. To be run when that table changes.
"""

import pathlib
import re
import sys
from xml.sax.saxutils import escape

from tools.round_picture import INK, LINE, QUIET

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

    def text(x, y, said, *, anchor="middle", fill=QUIET, more=""):
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{more}>'
            f"{escape(said)}</text>"
        )

    parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for percent in range(0, most + 1, 20):
        y = y_of(percent)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(text(left - 8, y + 4, f"{percent} %", anchor="end"))
    parts += [text(x_of(n), floor + 18, f"{share:g}") for n, share in enumerate(shares)]
    said = "the host's memory, in what blocks of all prefixes take"
    parts.append(text((left + right) / 2, height - 10, said))
    parts.append(text(left, TOP - 8, "prompt tokens that were computed", anchor="start", fill=INK))
    labels = sorted((values[-1], name) for name, values in policies.items())
    at = {name: max(y_of(value), 0) for value, name in labels}
    taken = []
    for (name, values), colour in zip(policies.items(), COLOURS, strict=False):
        corners = " ".join(f"{x_of(n):.1f},{y_of(value):.1f}" for n, value in enumerate(values))
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x_of(n):.1f}" cy="{y_of(value):.1f}" r="3.5" fill="{colour}"/>'
            for n, value in enumerate(values)
        ]
        y = at[name]
        while any(abs(y - other) < 16 for other in taken):
            y += 4
        taken.append(y)
        parts.append(text(right + 10, y + 4, name, anchor="start", fill=colour))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            "<title>Prompt tokens that were computed by snapshot policy and host memory</title>",
            *parts,
            "</svg>",
            "",
        ]
    )


def main():
    PICTURE.write_text(draw(*read_table(DOCUMENT.read_text())))
    print(PICTURE.relative_to(DOCUMENT.parents[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
