"""HTTP for operators: /status (JSON), /live, /ready. Knows none of the other rooms: what it shows is handed to it."""

from .credentials import AdminGuard
from .events import RecentEvents
from .server import AdminView, open_admin

__all__ = ["AdminGuard", "AdminView", "RecentEvents", "open_admin"]
