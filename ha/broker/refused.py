"""How a handler refuses a request that it has understood."""

from __future__ import annotations

from ha.broker.standing import Standing
from ha.protocol.codes import ResponseCode

REJECT_REMARK = "[REJECTREQUEST]system busy, start flow control for a while"


class RefusedError(Exception):
    """A check of one request failed. `code` and `remark` become its answer."""

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


def check_stores(standing: Standing) -> None:
    """Raises RefusedError while this broker may not store."""
    refusal = standing.why_not_stored()
    if refusal:
        raise RefusedError(standing.refusal_code, f"{REJECT_REMARK} ({refusal})")
