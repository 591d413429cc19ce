"""halog: a replicated message log for Python, byte-compatible with Apache RocketMQ.

The rooms and which of them may import which: ARCHITECTURE.md.
"""

__version__ = "0.1.0"
