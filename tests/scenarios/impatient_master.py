"""`python -m tests.scenarios.impatient_master`: ha.master, but retention begins at once instead of after a minute.

That first minute (RocketMQ's, and no key changes it there either) is all that differs.
"""

import sys

import msgspec

from ha.config import Config
from ha.master import ENTRY
from ha.node import options
from ha.store.options import StoreOptions

_store_options = options.store_options


def store_options_without_first_wait(
    config: Config, advertised: options.Advertised, open_files_max: int = options.OPEN_FILES_UNLIMITED
) -> StoreOptions:
    return msgspec.structs.replace(_store_options(config, advertised, open_files_max), clean_first_s=0.0)


if __name__ == "__main__":
    options.store_options = store_options_without_first_wait
    sys.exit(ENTRY.main())
