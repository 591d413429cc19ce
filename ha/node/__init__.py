"""One broker process: startup.py assembles it from the other packages."""

from .node import Node
from .roles import open_master, open_member_node, open_slave, serve
from .startup import open_node

__all__ = ["Node", "open_master", "open_member_node", "open_node", "open_slave", "serve"]
