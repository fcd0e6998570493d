"""The parts that the pictures of the documents share: lines, text and the frame of an SVG."""

from typing import NamedTuple
from xml.sax.saxutils import escape

INK, QUIET, LINE = "#23262b", "#666a72", "#e2dfd7"
"""Colours of what is said first, of what stands at the edges and of lines of a grid."""


def text(x, y, said, *, anchor="middle", fill=QUIET, more=""):
    """Text whose base line is at y."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{more}>'
        f"{escape(said)}</text>"
    )


def line(x1, y1, x2, y2, stroke, more=""):
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{more}/>'
    )


def polyline(points, stroke):
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{corners}" fill="none" stroke="{stroke}" stroke-width="2"/>'


def dot(x, y, radius, fill):
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>'


class Plot(NamedTuple):
    """Where a picture's points lie: its size, and what its edges leave free."""

    size: tuple[int, int]
    left: int
    right: int
    top: int
    bottom: int

    def x_of(self, share):
        """Of a share of the width, from the left."""
        return self.left + share * (self.size[0] - self.left - self.right)

    def y_of(self, share):
        """Of a share of the height, from below."""
        return self.size[1] - self.bottom - share * (self.size[1] - self.top - self.bottom)


def axes(plot, *, most, step, ticks, below, beside):
    """A line for each step up to the most, ticks (x, text), and what both axes are called."""
    left, right, floor = plot.x_of(0), plot.x_of(1), plot.y_of(0)
    parts = []
    for value in range(0, most + 1, step):
        y = plot.y_of(value / most)
        parts += [line(left, y, right, y, LINE), text(left - 8, y + 4, f"{value:,}", anchor="end")]
    parts += [text(x, floor + 18, said) for x, said in ticks]
    parts.append(text((left + right) / 2, plot.size[1] - 10, below))
    middle = (floor + plot.top) / 2
    turned = f' transform="rotate(-90 16 {middle:.1f})"'
    return [*parts, text(16, middle, beside, more=turned)]


def document(size, title, parts):
    """The whole picture, on white; its title is read out where it cannot be seen."""
    width, height = size
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def write(picture, drawn):
    """Writes it and says where, from the root of the repository."""
    picture.write_text(drawn)
    print(picture.relative_to(picture.parents[2]))
    return 0
