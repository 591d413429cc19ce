"""Imports modules that a node needs soon after READY, but not to serve; entry points import it in a worker thread.

Code that needs one of these modules earlier also imports it in a worker thread, because an import would block the event
loop.
"""

from contextlib import suppress
from importlib import import_module

with suppress(ImportError, OSError):  # too many files are open: the first connection of the admin port imports it
    import_module("ha.admin.server")
