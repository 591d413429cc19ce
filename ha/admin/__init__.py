"""The HTTP port for operators. Does not know the rest of the node, which passes it an AdminView."""

from .events import RecentEvents
from .port import open_admin
from .sessions import AdminKey
from .view import AdminView

__all__ = ["AdminKey", "AdminView", "RecentEvents", "open_admin"]
