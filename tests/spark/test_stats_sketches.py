"""Sketches keep the errors that they state, however the values are cut into parts and merged."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ha.spark.jobs.stats.range import _histograms
from ha.spark.jobs.stats.sketches import RELATIVE_ERROR, HeavyHitters, LogHistogram

VALUES = st.lists(st.one_of(st.integers(-5, 100), st.integers(0, 2**40)), min_size=1, max_size=200)


@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_within_the_relative_error(parts: list[list[int]], q: float) -> None:
    merged = LogHistogram()
    for part in parts:
        [histogram] = _histograms(np.zeros(len(part), np.int64), np.array(part, np.int64), 1)
        merged.merge(histogram)
    values = sorted(value for part in parts for value in part)
    exact = values[int(q * (len(values) - 1))]
    found = merged.quantile(q)
    assert found is not None
    if exact < 1:
        assert found <= 0 if values[-1] < 1 else found <= 1
    else:
        assert abs(found - exact) <= RELATIVE_ERROR * exact * 1.000001
    assert (merged.total, merged.minimum, merged.maximum) == (len(values), values[0], values[-1])


def test_no_values_have_no_quantile() -> None:
    assert LogHistogram().quantile(0.5) is None


@given(
    st.lists(st.lists(st.sampled_from("abcdefghij") | st.text(max_size=2), max_size=60), max_size=5),
    st.integers(1, 12),
)
def test_frequent_values_are_kept_and_their_counts_are_bounded(parts: list[list[str]], capacity: int) -> None:
    merged = HeavyHitters(capacity)
    for part in parts:
        seen = HeavyHitters(capacity)
        seen.add(Counter(part).items())
        merged.merge(seen)
    exact = Counter(value for part in parts for value in part)
    assert merged.total == sum(exact.values())
    assert len(merged.counts) <= capacity
    assert merged.error <= merged.total / (capacity + 1)
    for value, count in exact.items():
        shown = merged.counts.get(value, 0)
        assert shown <= count <= shown + merged.error
