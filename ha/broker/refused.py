"""How a handler refuses a request that it has understood."""

from __future__ import annotations

from ha.protocol.codes import ResponseCode


class RefusedError(Exception):
    """A check of one request failed; this is its answer. `Processor` and the batches of sends turn it into that."""

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark
