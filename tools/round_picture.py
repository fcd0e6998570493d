"""The picture of rounds of drafts in the documents: `python -m tools.round_picture`.

Tokens a second of one request against tokens a round, beside plain steps, drawn from the table of
`docs/benchmarks/decode_steps.md`. To be run when that table changes.
"""

import pathlib
import re
import sys

from tools.svg import INK, LINE, document, dot, line, polyline, text, write

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "decode_steps.md"
PICTURE = DOCUMENT.with_name("rounds.svg")

SIZE, LEFT, RIGHT, TOP, BOTTOM = (640, 360), 64, 40, 24, 52
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
    width, height = SIZE

    def x_of(tokens):
        return LEFT + tokens / MOST_X * (width - LEFT - RIGHT)

    def y_of(tokens_s):
        return height - BOTTOM - tokens_s / MOST_Y * (height - TOP - BOTTOM)

    left, right, floor = x_of(0), x_of(MOST_X), y_of(0)
    parts = []
    for tokens_s in range(0, MOST_Y + 1, STEP_Y):
        y = y_of(tokens_s)
        parts += [line(left, y, right, y, LINE), text(left - 8, y + 4, f"{tokens_s}", anchor="end")]
    parts += [text(x_of(n), floor + 18, f"{n}") for n in range(MOST_X + 1)]
    parts.append(text((left + right) / 2, height - 10, "tokens a round"))
    middle = (floor + TOP) / 2
    turned = f' transform="rotate(-90 16 {middle:.1f})"'
    parts.append(text(16, middle, "tokens a second, one request", more=turned))

    plain = 1000 / plain_ms
    parts.append(line(left, y_of(plain), right, y_of(plain), INK, ' stroke-dasharray="6 4"'))
    said = f"plain steps: {plain:.0f}"
    parts.append(text(right, y_of(plain) + 16, said, anchor="end", fill=INK))
    parts.append(polyline([(x_of(x), y_of(y)) for x, y, _ in points], ACCENT))
    for x, y, times in points:
        parts.append(dot(x_of(x), y_of(y), 4, ACCENT))
        parts.append(text(x_of(x) + 10, y_of(y) + 18, f"{y}, {times:.2f} times", anchor="start"))
    said = "Tokens a second of one request by tokens a round, beside plain steps"
    return document(SIZE, said, parts)


def main():
    return write(PICTURE, draw(*read_table(DOCUMENT.read_text())))


if __name__ == "__main__":
    sys.exit(main())
