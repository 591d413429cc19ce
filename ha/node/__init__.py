"""One broker process, put together from the rooms below; see node.py."""

from .node import Node, open_master, open_member_node, open_node, open_slave, serve_master, serve_member, serve_slave

__all__ = [
    "Node",
    "open_master",
    "open_member_node",
    "open_node",
    "open_slave",
    "serve_master",
    "serve_member",
    "serve_slave",
]
