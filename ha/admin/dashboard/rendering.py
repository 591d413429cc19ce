"""Renders templates.

A worker thread imports this module and creates the `Renderer` for the first page, because both are slow.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..credentials import DASHBOARD_PATH
from .assets import asset_url
from .bodies import in_line, preview_body
from .formats import FILTERS


class Renderer:
    """All templates, compiled. Values are escaped."""

    def __init__(self) -> None:
        """Compiles the templates, which takes a few tenths of a second."""
        environment = Environment(
            loader=PackageLoader(__package__),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters.update(FILTERS, in_line=in_line, preview=preview_body)
        environment.globals.update(asset_url=asset_url, root=DASHBOARD_PATH)
        self._templates = {name: environment.get_template(name) for name in environment.list_templates()}

    def render(self, template: str, shown: dict[str, object]) -> str:
        """Renders a page or a part of one."""
        return self._templates[template].render(shown)
