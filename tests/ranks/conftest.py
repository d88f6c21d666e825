"""Tests for any number of ranks, whose expected values come from rank and size.

tests/test_mpirun.py runs them; by hand: `mpirun -n 3 python -m pytest tests/ranks`.
"""

import pytest

from jaxmpi.allreduce import sharded


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers are not tried out first, which compiles for a second each: tests/allreduce/test_sharded.py does."""
    monkeypatch.setattr(sharded, "check_sharding", lambda *args, **options: None)
