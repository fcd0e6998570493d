"""The picture of rounds of drafts in the documents: `python -m tools.round_picture`.

Tokens a second of one request against tokens a round, beside plain steps, drawn from the table of
`docs/benchmarks/decode_steps.md`. To be run when that table changes.
"""

import pathlib
import re
import sys

from tools.svg import INK, Plot, axes, document, dot, line, polyline, text, write

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "decode_steps.md"
PICTURE = DOCUMENT.with_name("rounds.svg")

PLOT = Plot((640, 360), left=64, right=40, top=24, bottom=52)
MOST_X, MOST_Y, STEP_Y = 6, 500, 100
ACCENT = "#2b7a74"


def read_table(document):
    """Of one request: [(tokens a round, tokens a second, times those of plain steps)], plain ms."""
    section = document.split("### Rounds of DSpark drafts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d\.\d) \| [\d.]+ \| (\d+) \| (\d\.\d+) \|$", section, re.MULTILINE)
    (plain,) = re.findall(r"^\| plain step [^|]*\| (\d+\.\d+) ms", section, re.MULTILINE)
    return [(float(x), int(y), float(times)) for x, y, times in rows], float(plain)


def draw(points, plain_ms):
    """The picture as text; points as of `read_table`."""

    def x_of(tokens):
        return PLOT.x_of(tokens / MOST_X)

    def y_of(tokens_s):
        return PLOT.y_of(tokens_s / MOST_Y)

    parts = axes(
        PLOT,
        most=MOST_Y,
        step=STEP_Y,
        ticks=[(x_of(n), f"{n}") for n in range(MOST_X + 1)],
        below="tokens a round",
        beside="tokens a second, one request",
    )
    left, right = x_of(0), x_of(MOST_X)
    plain = 1000 / plain_ms
    parts.append(line(left, y_of(plain), right, y_of(plain), INK, ' stroke-dasharray="6 4"'))
    said = f"plain steps: {plain:.0f}"
    parts.append(text(right, y_of(plain) + 16, said, anchor="end", fill=INK))
    parts.append(polyline([(x_of(x), y_of(y)) for x, y, _ in points], ACCENT))
    for x, y, times in points:
        parts.append(dot(x_of(x), y_of(y), 4, ACCENT))
        parts.append(text(x_of(x) + 10, y_of(y) + 18, f"{y}, {times:.2f} times", anchor="start"))
    said = "Tokens a second of one request by tokens a round, beside plain steps"
    return document(PLOT.size, said, parts)


def main():
    return write(PICTURE, draw(*read_table(DOCUMENT.read_text())))


if __name__ == "__main__":
    sys.exit(main())
