"""The picture of long prompts in the documents: `python -m tools.prompt_picture`.

Tokens a second and seconds of one prompt against its length, drawn from the table of
`docs/benchmarks/prefill.md`. To be run when that table changes.
"""

import math
import pathlib
import re
import sys

from tools.svg import INK, Plot, axes, document, dot, polyline, text, write

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "prefill.md"
PICTURE = DOCUMENT.with_name("prompts.svg")

PLOT = Plot((640, 340), left=76, right=60, top=32, bottom=52)
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

    def x_of(tokens):
        return PLOT.x_of(math.log2(tokens / FIRST) / math.log2(LAST / FIRST))

    def y_of(tokens_s):
        return PLOT.y_of(tokens_s / MOST_Y)

    parts = axes(
        PLOT,
        most=MOST_Y,
        step=STEP_Y,
        ticks=[(x_of(tokens), f"{tokens:,}") for tokens, _, _ in points],
        below="tokens of the prompt",
        beside="tokens a second",
    )
    parts.append(polyline([(x_of(tokens), y_of(rate)) for tokens, _, rate in points], ACCENT))
    for tokens, seconds, rate in points:
        parts.append(dot(x_of(tokens), y_of(rate), 4, ACCENT))
        parts.append(text(x_of(tokens), y_of(rate) - 12, f"{seconds:.3g} s", fill=INK))
    said = "Tokens a second of one prompt by its length, and the seconds that it takes"
    return document(PLOT.size, said, parts)


def main():
    return write(PICTURE, draw(read_table(DOCUMENT.read_text())))


if __name__ == "__main__":
    sys.exit(main())
