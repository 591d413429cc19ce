"""MkDocs hook (mkdocs.yml): adds pages from outside docs/, and rewrites links between files to links between pages.

Links in the repository are relative file paths, so that they work on code hosting sites. A link to a file that is not
a page fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "measuring.md",
}
"""Path in the repository -> page of the site."""

ALONGSIDE = "deploy"
"""A directory of the repository whose files are copied to the site."""

_HOME = """\
<div class="hero" markdown>
{title}
{promise}

[Tutorial](docs/tutorial.md){{ .md-button .md-button--primary }}
[Recipes](docs/recipes.md){{ .md-button }}
[Benchmarks](docs/benchmarks.md){{ .md-button }}
</div>

<div class="beside" markdown>
<div markdown>
{start}
</div>
<div markdown>
{picture}
</div>
</div>

<div class="beside verdict" markdown>
<div markdown>
{for}
</div>
<div markdown>
{against}
</div>
</div>

{rest}"""

_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(?ms)^```.*?^```|`[^`\n]+`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files from outside docs/."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for file in sorted((ROOT / ALONGSIDE).rglob("*")):
        if file.is_file():
            files.append(File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the page's links, and lays out the home page."""
    here = page.file.src_uri
    if here == OUTSIDE["README.md"]:
        page.meta["hide"] = ["navigation", "toc"]
        markdown = home(markdown)
    return linked(markdown, here)


def home(readme: str) -> str:
    """Returns README.md as the home page: with buttons, and what speaks for and against halog side by side.

    Raises PluginError if README.md has no such parts."""
    parts = re.fullmatch(
        r"(?s)(?P<title># .+?\n)\n(?P<promise>.+?)\n\n(?P<start>```sh\n.+?)(?P<picture>!\[[^\n]+\n)\n"
        r"(?P<for>## Use it if.+?)(?P<against>## Don't use it if.+?\n)\n(?P<rest>\[halog or .+)",
        readme,
    )
    if parts is None:
        raise PluginError("README.md: the home page needs its opening, its picture, and both lists")
    return _HOME.format(**parts.groupdict())


def linked(markdown: str, here: str) -> str:
    """Returns `markdown`, the text of page `here`, with links to files replaced by links to pages.

    Raises PluginError for a link to a file that is not a page of the site.
    """
    paths = {page: path for path, page in OUTSIDE.items()}
    folder = posixpath.dirname(paths.get(here, f"docs/{here}"))

    def lead(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if ":" in target or target.startswith("#"):
            return match[0]
        path, mark, anchor = target.partition("#")
        return before + _page(posixpath.normpath(posixpath.join(folder, path)), here) + mark + anchor + after

    code = [match.span() for match in _CODE.finditer(markdown)]
    return _LINK.sub(
        lambda match: match[0] if any(begin <= match.start() < end for begin, end in code) else lead(match), markdown
    )


def _page(path: str, here: str) -> str:
    if path in OUTSIDE:
        page = OUTSIDE[path]
    elif path.startswith("docs/"):
        page = path.removeprefix("docs/")
    elif path.startswith(f"{ALONGSIDE}/"):
        page = path
    else:
        raise PluginError(f"{here}: link to {path}, which is not a page of the site")
    return posixpath.relpath(page, posixpath.dirname(here) or ".")
