"""Runs one target under atheris: `python -m tests.fuzz TARGET [libFuzzer's arguments]`; scripts/fuzz runs all of them.

libFuzzer's arguments are directories of inputs and options such as -max_total_time=60; the harness provides the
defaults. A finding ends the process with libFuzzer's exit code and a file crash-… or timeout-….
"""

import logging
import os
import resource
import sys

import atheris

from tests.fuzz import registry
from tests.fuzz.harness import run_measured, run_timed

ADDRESS_SPACE_MAX = 4 << 30
"""In bytes: turns an allocation by an unchecked length into a MemoryError, which is a finding"""
MEASURED_EACH = 64
"""One of this many inputs is run again to measure its allocations"""
HANG_S = 30
SELF = "HALOG_FUZZ_SELF"
"""Environment variable: the command line of this process, which libFuzzer runs repeatedly to merge"""


def main(arguments: list[str]) -> None:
    """Run the fuzzer until libFuzzer ends the process."""
    name, *rest = arguments
    with atheris.instrument_imports(include=["ha"]):
        harness = registry.load(name)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_MAX, ADDRESS_SPACE_MAX))
    run_count = 0

    def run(data: bytes) -> None:
        nonlocal run_count
        run_count += 1
        run_timed(harness, data)
        if run_count % MEASURED_EACH == 0:
            run_measured(harness, data)

    options = [f"-max_len={harness.size_max}", f"-timeout={HANG_S}", "-rss_limit_mb=2048"]
    given = {argument.partition("=")[0] for argument in rest}
    defaults = [option for option in options if option.partition("=")[0] not in given]
    atheris.Setup([os.environ.get(SELF, sys.argv[0]), *defaults, *rest], run)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in registry.MODULES:
        print(f"targets: {' '.join(registry.MODULES)}", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1:])
