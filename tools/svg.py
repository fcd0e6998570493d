"""The parts that the pictures of the documents share: lines, text and the frame of an SVG."""

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
