"""Imports modules that a node needs soon after READY, but not to serve; entry points import it in a worker thread.

Code that needs one of these modules earlier also imports it in a worker thread, because an import would block the event
loop.
"""

import ha.admin.server

__all__ = ["ha"]
