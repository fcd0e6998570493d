"""The picture of rounds of drafts in the documents: `python -m tools.round_picture`.

Tokens a second of one request against tokens a round, beside plain steps, drawn from the table of
`docs/benchmarks/decode_steps.md`. To be run when that table changes.
"""

import pathlib
import re
import sys
from xml.sax.saxutils import escape

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks" / "decode_steps.md"
PICTURE = DOCUMENT.with_name("rounds.svg")

SIZE, LEFT, RIGHT, TOP, BOTTOM = (640, 360), 64, 40, 24, 52
MOST_X, MOST_Y, STEP_Y = 6, 500, 100
INK, QUIET, LINE, ACCENT = "#23262b", "#666a72", "#e2dfd7", "#2b7a74"


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

    def text(x, y, said, *, anchor="middle", fill=QUIET, more=""):
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{more}>'
            f"{escape(said)}</text>"
        )

    def line(x1, y1, x2, y2, stroke, more=""):
        return (
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"'
            f"{more}/>"
        )

    left, right, floor = x_of(0), x_of(MOST_X), y_of(0)
    parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
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
    corners = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y, _ in points)
    parts.append(f'<polyline points="{corners}" fill="none" stroke="{ACCENT}" stroke-width="2"/>')
    for x, y, times in points:
        parts.append(f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4" fill="{ACCENT}"/>')
        parts.append(text(x_of(x) + 10, y_of(y) + 18, f"{y}, {times:.2f} times", anchor="start"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            "<title>Tokens a second of one request by tokens a round, beside plain steps</title>",
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
