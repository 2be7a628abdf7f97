"""Accumulators against numpy and by hand; the JSON-lines writer's format and failure."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydssp.observe.jsonl import JsonLinesWriter, read_records, to_strict
from hydssp.observe.statistics import IntHistogram, LogHistogram, WindowMean, WorkerStatistics, share_of_time


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_histogram_agrees_with_numpy(values, q):
    histogram = IntHistogram()
    for value in values:
        histogram.add(value)
    assert histogram.mean == pytest.approx(np.mean(values))
    assert histogram.max == max(values)
    assert histogram.quantile(q) == np.quantile(values, q, method="inverted_cdf")
    assert histogram.total == len(values)


def test_histogram_as_json():
    histogram = IntHistogram()
    for value in [10, 0, 0, 2]:
        histogram.add(value)
    assert histogram.to_dict() == {
        "mean": 3.0,
        "p50": 0,
        "p99": 10,
        "max": 10,
        "histogram": {"0": 2, "2": 1, "10": 1},
    }


def test_empty_accumulators_say_none():
    assert IntHistogram().to_dict() == {"mean": None, "p50": None, "p99": None, "max": None, "histogram": {}}
    assert WindowMean(3).mean is None


def test_log_histogram_counts_by_a_quarter_of_a_decade():
    histogram = LogHistogram()
    for value in [0.0, 0.001, 0.0017, 0.0018, 1.0, 10.0, 1000.0, math.inf, math.nan, -1.0]:
        histogram.add(value)
    assert histogram.to_dict() == {
        "mean": pytest.approx(1011.0045 / 7),
        "max": 1000.0,
        "histogram": {"0": 1, "0.001": 2, "0.00178": 1, "1": 1, "10": 1, "1e+03": 1},
    }
    edges = [edge for low, high, _ in histogram.bins() for edge in (low, high)]
    assert edges == sorted(edges)


SIZES = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), max_size=50)


@given(SIZES, SIZES)
def test_log_histogram_covers_each_value_and_adds_up(some, others):
    parts = []
    for values in (some, others, some + others):
        parts.append(LogHistogram())
        for value in values:
            parts[-1].add(value)
    one, two, whole = parts
    both = one + two
    assert (both.counts, both.total, both.max) == (whole.counts, whole.total, whole.max)
    for low, high, count in whole.bins():
        inside = [
            v for v in some + others if low <= v * (1 + 1e-9) and (v < high * (1 + 1e-9) or v == high == 0)
        ]
        assert len(inside) >= count


def test_sum_of_two_histograms_is_that_of_all_values():
    one, two = IntHistogram(), IntHistogram()
    for value in (1, 2, 2):
        one.add(value)
    two.add(2)
    assert (one + two).counts == {1: 1, 2: 3}
    assert ((one + two).total, (one + two).sum) == (4, 7)


def test_window_mean_weighs_forgets_and_skips_what_is_not_finite():
    mean = WindowMean(2)
    mean.add(100.0, 32)
    mean.add(1.0, 10)
    mean.add(math.nan, 32)
    mean.add(2.0, 30)
    assert mean.mean == pytest.approx(1.75)


def test_wait_ends_once_and_is_never_negative():
    worker = WorkerStatistics(waits_since=5.0)
    worker.end_wait(7.5)
    worker.end_wait(9.0)
    assert worker.wait_s == 2.5
    worker.waits_since = 10.0
    worker.end_wait(9.9999)
    assert worker.wait_s == 2.5


@pytest.mark.parametrize(("grant_sent_at", "expected"), [(None, 3.0), (6.0, 1.0)])
def test_leaving_worker_waited_until_its_grant_or_until_now(grant_sent_at, expected):
    worker = WorkerStatistics(waits_since=5.0, grant_sent_at=grant_sent_at, hold_cause="held_by_rule")
    worker.leave(8.0)
    assert worker.wait_s == expected
    assert not worker.is_active
    assert worker.hold_cause is None


def test_share_of_time():
    assert share_of_time({"compute": 3.0, "wait": 1.0}) == {"compute": 0.75, "wait": 0.25}
    assert share_of_time({"compute": 0.0}) == {"compute": 0.0}


def refuse_constant(name):
    raise AssertionError(f"{name} is not strict JSON")


def test_written_lines_are_strict_json(tmp_path):
    writer = JsonLinesWriter(tmp_path / "x.jsonl")
    writer.write({"a": 1, "b": math.nan, "c": [math.inf, {"d": -math.inf}], "e": 0.1})
    writer.write({"text": "two\nlines"})
    writer.close()
    writer.close()
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse_constant) for line in lines] == [
        {"a": 1, "b": None, "c": [None, {"d": None}], "e": 0.1},
        {"text": "two\nlines"},
    ]


def test_to_strict_makes_tuples_lists():
    assert to_strict({"a": (1, math.nan)}) == {"a": [1, None]}


def test_buffer_is_written_by_age_by_size_and_on_demand(tmp_path):
    path = tmp_path / "x.jsonl"
    writer = JsonLinesWriter(path, max_age_s=1.0, max_buffer_bytes=100)

    def written():
        return len(list(read_records(path)))

    writer.flush(10.0)
    writer.write({"a": 1}, 10.5)
    writer.flush_if_old(10.9)
    assert written() == 0
    writer.flush_if_old(11.0)
    assert written() == 1
    writer.write({"a": 2}, 11.9)
    assert written() == 1
    writer.write({"a": 3}, 12.0)
    assert written() == 3
    writer.write({"a": "x" * 100}, 12.1)
    assert written() == 4
    writer.write({"a": 4}, 12.2)
    assert written() == 4
    writer.flush()
    assert written() == 5
    writer.close()


def test_full_disk_warns_once_and_drops(tmp_path, caplog):
    class FullDisk:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    writer = JsonLinesWriter(tmp_path / "x.jsonl")
    writer._file.close()
    writer._file = FullDisk()
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            writer.write({"a": i}, float(i))
            writer.flush()
        writer.close()
    assert writer.num_dropped == 3
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_partial_writes_are_completed(tmp_path):
    class Slow:
        data = b""

        def write(self, data):
            self.data += bytes(data[:7])
            return len(data[:7])

        def close(self):
            pass

    writer = JsonLinesWriter(tmp_path / "x.jsonl")
    writer._file.close()
    writer._file = slow = Slow()
    writer.write({"key": "value" * 5})
    writer.flush()
    assert json.loads(slow.data) == {"key": "value" * 5}


def test_reading_passes_over_a_last_line_cut_short_only(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a":1}\n{"a":2}\n{"a":')
    assert list(read_records(path)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a":1}\n{"a":\n{"a":3}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_records(path))
