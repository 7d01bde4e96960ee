"""Lines of styled text for a terminal, and how words are made to fit into cells. Pure.

A line is a list of (text, style) spans; styles are names, so that what is drawn does not depend on how. Widths are
counted in terminal cells: a wide character takes two.

Not covered: escape sequences (`trainer.terminal`), what the lines say (`trainer.headline`, `trainer.screen`).
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
"""Text and the name of its style: "", `bold`, `dim`, `good`, `warn`, `bad` or `accent`."""
Line = list[Span]


def plain(line: Line) -> str:
    """A line without its styles."""
    return "".join(text for text, _ in line).rstrip()


def fit(alternatives: Iterable[str], width: int) -> str:
    """The first alternative that fits; where none does, the last one, with an ellipsis.

    Whoever writes alternatives makes the last one short enough: a sentence that lost its end may say something else.
    """
    text = ""
    for text in alternatives:
        if cell_len(text) <= width:
            return text
    return cell(text, width)


def cell(text: str, width: int, *, right: bool = False) -> str:
    """Exactly `width` cells: padded, or cut with an ellipsis. For names, which somebody else chose."""
    if cell_len(text) > width:
        return set_cell_size(text, max(0, width - 1)) + "…" * (width > 0)
    pad = " " * (width - cell_len(text))
    return pad + text if right else text + pad


def wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` cells, broken between words; a longer word is broken in itself."""
    lines = [""]
    for word in text.split(" "):
        while cell_len(word) > width:
            head = set_cell_size(word, width).rstrip()
            lines.append(head)
            word = word[len(head) :]
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    return [line for line in lines if line] or [""]


def size(count: int | None) -> str:
    """Bytes for a person, in at most 6 cells: 12 kB, 3.4 MB, 812 MB, 1.2 GB; empty for None."""
    if count is None:
        return ""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 9.95 and unit not in ("B", "kB") else f"{value:.0f} {unit}"


def length(seconds: float) -> str:
    """A length of time for a person: 8 s, 1:05, 2:03:04."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
