"""HTTP for operators: /status (JSON), /live, /ready. Knows none of the other rooms: what it shows is handed to it."""

from .events import RecentEvents
from .port import open_admin
from .sessions import AdminKey
from .view import AdminView

__all__ = ["AdminKey", "AdminView", "RecentEvents", "open_admin"]
