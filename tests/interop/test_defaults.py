"""RocketMQ's defaults in docs/configuration.md equal those of its brokers' classes.

HALOG_WRITE_TABLES=1 rewrites scripts/rocketmq_defaults.json.
"""

import json
import os
import subprocess

from scripts.configuration_table import ROCKETMQ_DEFAULTS, rocketmq_name, shared_keys
from tests.interop.releases import Release


def test_the_table_has_the_defaults_of_each_release(release: Release) -> None:
    command = ["java", "-cp", release.client_class_path, "Defaults"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    real = dict(line.split("=", 1) for line in lines if "=" in line)
    found = {key: real[name] for key in shared_keys() if (name := rocketmq_name(key, release.version)) in real}
    assert len(found) > 50
    written = json.loads(ROCKETMQ_DEFAULTS.read_text()) if ROCKETMQ_DEFAULTS.exists() else {}
    if os.environ.get("HALOG_WRITE_TABLES"):
        written[release.version] = found
        ROCKETMQ_DEFAULTS.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    assert written[release.version] == found
