"""Templates to pages. Imported, and made, in a worker thread when the first page is asked for: both take their time."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..credentials import DASHBOARD_PATH
from .assets import asset_url
from .bodies import in_line
from .formats import FILTERS


class Renderer:
    """Every template, compiled. What is shown is escaped, whatever it is."""

    def __init__(self) -> None:
        """Takes some tenths of a second."""
        environment = Environment(
            loader=PackageLoader(__package__),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters.update(FILTERS, in_line=in_line)
        environment.globals.update(asset_url=asset_url, root=DASHBOARD_PATH)
        self._templates = {name: environment.get_template(name) for name in environment.list_templates()}

    def render(self, template: str, shown: dict[str, object]) -> str:
        """Make a page, or a part of one."""
        return self._templates[template].render(shown)
