"""A disk under the broker's tables that fills up and gets room again."""

import errno
import os
from collections.abc import Callable
from typing import Any


class FullDisk:
    """`run` makes blocking calls inline. While `is_full`, writes (the only calls with content) fail."""

    def __init__(self) -> None:
        self.is_full = False

    async def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.is_full and any(isinstance(argument, bytes) for argument in arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*arguments)
