"""Check of traces, for tests of several rooms."""

from typing import Any

import numpy as np


def check_schema(trace: Any, ranks: int) -> list[dict]:
    """Assert what the Trace Event Format asks for, as far as it is used; return the events with a length."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = {"process_name": set(), "thread_name": set()}
    lengths = []
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            named[event["name"]].add((event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert np.isfinite([event["ts"], event["dur"]]).all()
            lengths.append(event)
    assert {pid for pid, _ in named["process_name"]} == set(range(ranks))
    assert {(e["pid"], e["tid"]) for e in lengths} <= named["thread_name"]
    return lengths
