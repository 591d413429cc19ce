"""Two hours of a whole cluster leave nothing behind; twelve: `scripts/soak --virtual-hours 12`."""

import logging

import pytest

from tests.load import virtual_soak
from tests.load.flatness import growth_of_samples


def test_nothing_grows_between_half_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ha"), "propagate", False)  # pytest keeps every record
    report = virtual_soak.run(2, sample_h=0.5)
    for sample in report.samples:
        print(sample.hour, sample.task_count, sample.object_count, sample.block_count, sample.tables)
    assert growth_of_samples(report.samples) == []
    traffic = report.traffic
    assert traffic.acked_count > 3500
    assert traffic.consumed_count == traffic.acked_count + traffic.refused_count  # refused: stored without a slave
    assert report.deleted_offset > 1 << 20
    assert (traffic.client_count, traffic.cut_count, traffic.stranger_count) >= (230, 11, 110)
    assert traffic.slave_restart_count >= 3
