"""The documentation site builds without warnings and loads nothing from elsewhere, and generated pages are current."""

import re
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.exceptions import PluginError

import ha
import ha.client
from ha.replication.progress import SlaveState
from scripts import docs_site, reference
from scripts.reference import PAGES, handlers
from tests.dashboard.browser import open_browser
from tests.docs.pages import DOCS, ROOT
from tests.docs.test_compatibility import ticked


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site like `scripts/docs build`; warnings of MkDocs are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetched(HTMLParser):
    """Collects the addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.classes.update(given.get("class", "").split())
        if tag in {"script", "img", "iframe", "source", "video", "audio", "embed"}:
            self.addresses.append(given.get("src", ""))
        if tag == "link" and given.get("rel") not in {"canonical", "prev", "next"}:
            self.addresses.append(given.get("href", ""))


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        fetched = Fetched()
        fetched.feed(page.read_text())
        elsewhere = [address for address in fetched.addresses if re.match(r"(https?:)?//", address)]
        assert not elsewhere, f"{page.relative_to(site)}: {elsewhere}"
        assert "mermaid" not in fetched.classes, "Material loads mermaid from a CDN"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text()), sheet


def test_first_page_is_the_readme(site: Path) -> None:
    front = (site / "index.html").read_text()
    assert "A replicated message log for Python" in front
    for name in re.findall(r"\]\(docs/([\w/-]+)\.md\)", (ROOT / "README.md").read_text()):
        assert f'href="{name}/"' in front, name


def test_reference_has_every_public_name(site: Path) -> None:
    for page, module, left_out in (("client", ha.client, set()), ("library", ha, {"__version__"})):
        text = (site / "reference" / page / "index.html").read_text()
        shown = {name for name in module.__all__ if f'id="{module.__name__}.{name}"' in text}
        assert set(module.__all__) - shown == left_out


CUT_OFF = """() => [...document.querySelectorAll("article pre > code")]
    .filter((code) => code.scrollWidth > code.clientWidth + 1)
    .map((code) => code.textContent.slice(0, 60))"""


def test_no_code_is_cut_off(site: Path) -> None:
    pages = [page for page in sorted(site.rglob("index.html")) if "<pre" in page.read_text()]
    assert len(pages) > 15
    with open_browser() as browser, closing(browser.new_page()) as page:
        for width in (1400, 390):
            page.set_viewport_size({"width": width, "height": 900})
            for path in pages:
                page.goto(path.as_uri())
                assert page.evaluate(CUT_OFF) == [], f"{path.relative_to(site)} at {width} pixels"


def test_home_page_has_the_whole_readme(site: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    laid_out = docs_site.home(readme)
    assert [line for line in readme.splitlines() if line not in laid_out.splitlines()] == []
    front = (site / "index.html").read_text()
    assert 'class="md-button md-button--primary"' in front
    assert "](docs/" not in front
    with pytest.raises(PluginError, match="the home page needs"):
        docs_site.home("# halog\n")


def test_links_between_files_become_links_between_pages() -> None:
    text = "[a](docs/tls.md#x) [b](ARCHITECTURE.md) `[c](docs/x.md)`"
    assert docs_site.linked(text, "index.md") == "[a](tls.md#x) [b](architecture.md) `[c](docs/x.md)`"
    assert docs_site.linked("[a](../README.md)", "cli.md") == "[a](index.md)"
    assert docs_site.linked("[a](../cli.md)", "reference/commands.md") == "[a](../cli.md)"
    assert docs_site.linked("[a](../docs/benchmarks.md)", "measuring.md") == "[a](benchmarks.md)"
    assert docs_site.linked("[a](../deploy/kubernetes/members.yaml)", "x.md") == "[a](deploy/kubernetes/members.yaml)"
    with pytest.raises(PluginError, match="not a page of the site"):
        docs_site.linked("[a](../ha/errors.py)", "cli.md")


def test_pictures_have_alternative_texts() -> None:
    for page in DOCS.rglob("*.md"):
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert words.strip(), f"{page.name}: {target}"
            assert (page.parent / target).is_file()
    for picture in (DOCS / "diagrams").glob("*.svg"):
        text = picture.read_text()
        assert "prefers-color-scheme: dark" in text
        assert "<title" in text


def test_the_diagram_of_a_slaves_connection_shows_its_states() -> None:
    text = (DOCS / "diagrams" / "slave-states.svg").read_text()
    boxes = re.findall(r'rx="6"/><text[^>]*>([^<]*)<', text)
    assert sorted(boxes) == sorted(state.value for state in SlaveState)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_generated_pages_are_current(path: Path) -> None:
    assert path.read_text() == PAGES[path](), "run: scripts/reference"


def test_every_parameter_of_a_command_has_a_help_text() -> None:
    assert re.findall(r"(?m)^\* `[^`]+`:\s*$", PAGES[DOCS / "reference" / "commands.md"]()) == []


def test_table_of_codes_matches_the_compatibility_page() -> None:
    found = {place: {int(code) for code in codes} for place, codes in handlers().items()}
    assert found["broker"] == ticked("broker")
    assert found["name server"] == ticked("name server")


def test_tree_of_errors_is_complete() -> None:
    from ha import errors

    page = reference.error_tree()
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.HalogError):
            assert f"- **{name}**: " in page
