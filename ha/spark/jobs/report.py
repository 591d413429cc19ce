"""Builds the HTML reports of the jobs: one self-contained file each, with style and plots, for light and dark mode.

Text is escaped here and nowhere else: topics, keys and tags from a log may contain anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Literal, NamedTuple

from ha.spark.jobs.plots import Plot, to_svg

Verdict = Literal["good", "bad", "note"]

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #22262b; --soft: #5d656e; --rule: #d9dde1; --band: #f4f6f8;
  --good: #0a6b3d; --good-band: #e3f4ea; --bad: #a3200f; --bad-band: #fdeae6; --note: #7a5200; --note-band: #fdf3dc; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181b; --ink: #e4e7ea; --soft: #9aa3ac; --rule: #363c43;
  --band: #1d2125; --good: #6fd19b; --good-band: #15301f; --bad: #ff9b87; --bad-band: #3a1913; --note: #eec36a;
  --note-band: #352a12; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, caption, footer { color: var(--soft); }
.verdict { display: inline-block; padding: .35rem .8rem; border-radius: .4rem; font-weight: 600; }
.good { background: var(--good-band); color: var(--good); }
.bad { background: var(--bad-band); color: var(--bad); }
.note { background: var(--note-band); color: var(--note); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .28rem .75rem .28rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.short { max-width: 22rem; overflow-wrap: break-word; }
td.long { min-width: 12rem; overflow-wrap: anywhere; }
td.code { font: .8rem ui-monospace, "DejaVu Sans Mono", monospace; white-space: nowrap; }
figure { margin: 1rem 0; }
figure svg { max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .87rem; }
footer { margin-top: 3rem; font-size: .87rem; border-top: 1px solid var(--rule); padding-top: .75rem; }
"""


class Column(NamedTuple):
    """A table's column. Numbers are right-aligned; long text wraps anywhere."""

    title: str
    kind: Literal["number", "short", "long", "code"] = "short"


def page(title: str, verdict: tuple[Verdict, str], parts: Iterable[str], footer: str) -> str:
    """Returns the page as HTML. `verdict`: its kind and its text; `parts`: HTML from the functions below."""
    kind, text = verdict
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="verdict {kind}">{escape(text)}</p>\n'
        + "\n".join(parts)
        + f"\n<footer>{escape(footer)}</footer>\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """Returns a section's heading."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, *, soft: bool = False) -> str:
    """Returns a paragraph; in a muted colour if `soft`."""
    return f'<p class="soft">{escape(text)}</p>' if soft else f"<p>{escape(text)}</p>"


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, note: str = "") -> str:
    """Returns a table of text, with `note` below it."""
    kinds = [column.kind for column in columns]
    head = "".join(f'<th class="{kind}">{escape(c.title)}</th>' for c, kind in zip(columns, kinds, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    below = paragraph(note, soft=True) if note else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{below}'


def picture(plot: Plot) -> str:
    """Returns a plot as SVG, with its title as caption."""
    return f"<figure>{to_svg(plot)}<figcaption>{escape(plot.title)}</figcaption></figure>"


def number(value: float | None) -> str:
    """Formats a number with thin spaces (1 234 567); "–" for None.

    A fraction is rounded: below 1000 to four significant digits, otherwise to an integer.
    """
    if value is None:
        return "–"
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}".replace(",", "\u202f")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.4g}"


def size(value: float | None) -> str:
    """Formats a number of bytes with a binary unit; "–" for None."""
    if value is None:
        return "–"
    amount, unit = float(value), 0
    while abs(amount) >= 1024 and unit < 5:
        amount, unit = amount / 1024, unit + 1
    name = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[unit]
    return f"{amount:.0f}\u202f{name}" if unit == 0 or amount >= 100 else f"{amount:.1f}\u202f{name}"


def hour(hours: int) -> str:
    """Formats hours since 1970 as date and hour in UTC; "–" for negative ones, "… h after 1970" beyond year 9999."""
    try:
        return "–" if hours < 0 else datetime.fromtimestamp(hours * 3600, UTC).strftime("%Y-%m-%d\u00a0%H:00")
    except (ValueError, OverflowError, OSError):
        return f"{hours} h after 1970"


def moment(time_ms: int) -> str:
    """Formats a time in ms since 1970 in UTC, to the second; "… ms after 1970" if the year is not within 1 to 9999."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms after 1970"
