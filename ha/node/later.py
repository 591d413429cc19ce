"""Imports modules that a node needs soon after READY, but not to become ready.

Entry points import this module in a worker thread, because an import would block the event loop. Code that needs one of
the imported modules earlier also imports it in a worker thread.
"""

from contextlib import suppress
from importlib import import_module

with suppress(ImportError, OSError):  # too many open files; the first connection to the admin port imports the module
    import_module("ha.admin.server")
