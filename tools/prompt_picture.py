"""The picture of long prompts in the documents: `python -m tools.prompt_picture`.

Tokens a second and seconds of one prompt against its length, drawn from the table of
`docs/benchmarks/prefill.md`. To be run when that table changes.
"""

import math
import pathlib
import re
import sys

from tools.svg import INK, LINE, document, dot, line, polyline, text, write

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "prefill.md"
PICTURE = DOCUMENT.with_name("prompts.svg")

SIZE, LEFT, RIGHT, TOP, BOTTOM = (640, 340), 76, 60, 32, 52
FIRST, LAST = 2**12, 2**21
"""Tokens at the ends of the axis, whose steps are factors of two."""
MOST_Y, STEP_Y = 20_000, 5_000
ACCENT = "#2b7a74"


def read_table(document, call_tokens=8192, routing="uniform"):
    """Of prompts in calls of one size, by one law: [(tokens, seconds, tokens a second)]."""
    section = document.split("## V4-Flash\n")[1].split("\n## ")[0]
    pattern = rf"^\| ([\d,]+) \| {call_tokens:,} \| {routing} \| ([\d.]+)[^|]* \| ([\d,]+) \|"
    rows = re.findall(pattern, section, re.MULTILINE)
    return [(_number(tokens), float(s), _number(rate)) for tokens, s, rate in rows]


def _number(digits):
    return int(digits.replace(",", ""))


def draw(points):
    """The picture as text; points as of `read_table`."""
    width, height = SIZE

    def x_of(tokens):
        share = math.log2(tokens / FIRST) / math.log2(LAST / FIRST)
        return LEFT + share * (width - LEFT - RIGHT)

    def y_of(tokens_s):
        return height - BOTTOM - tokens_s / MOST_Y * (height - TOP - BOTTOM)

    left, right, floor = x_of(FIRST), x_of(LAST), y_of(0)
    parts = []
    for tokens_s in range(0, MOST_Y + 1, STEP_Y):
        y = y_of(tokens_s)
        parts += [
            line(left, y, right, y, LINE),
            text(left - 8, y + 4, f"{tokens_s:,}", anchor="end"),
        ]
    for tokens, _, _ in points:
        parts.append(text(x_of(tokens), floor + 18, f"{tokens:,}"))
    parts.append(text((left + right) / 2, height - 10, "tokens of the prompt"))
    middle = (floor + TOP) / 2
    turned = f' transform="rotate(-90 16 {middle:.1f})"'
    parts.append(text(16, middle, "tokens a second", more=turned))

    parts.append(polyline([(x_of(tokens), y_of(rate)) for tokens, _, rate in points], ACCENT))
    for tokens, seconds, rate in points:
        parts.append(dot(x_of(tokens), y_of(rate), 4, ACCENT))
        parts.append(text(x_of(tokens), y_of(rate) - 12, f"{seconds:.3g} s", fill=INK))
    said = "Tokens a second of one prompt by its length, and the seconds that it takes"
    return document(SIZE, said, parts)


def main():
    return write(PICTURE, draw(read_table(DOCUMENT.read_text())))


if __name__ == "__main__":
    sys.exit(main())
