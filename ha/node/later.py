"""What a node needs soon after it serves, but not to serve: entry points have a worker import it then (ha/process.py).

Whoever needs one of these modules before imports it as well, in a worker of its own, and waits for it there: an import
on the event loop would hold it for as long as that takes.
"""

import ha.admin.server

__all__ = ["ha"]
