"""Virtual time over real sockets."""

import pytest
import trio.testing


@pytest.fixture
def socket_clock() -> trio.testing.MockClock:
    """Jumps to the next deadline once all tasks have waited for 50 ms: loopback delivers what was sent by then."""
    return trio.testing.MockClock(autojump_threshold=0.05)
