"""The verifier's inner loops by numpy and compiled (`verifier.compiled`), for tests that must hold with both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verifier import compiled


@pytest.fixture(params=["numpy", "compiled"], scope="module", autouse=True)
def back_end(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of a module that imports this runs twice."""
    before = compiled._off, compiled._made
    compiled._off, compiled._made = request.param == "numpy", compiled.PAYS_FROM
    yield str(request.param)
    as_asked = compiled._off == (request.param == "numpy") and None not in compiled._ready.values()
    compiled._off, compiled._made = before
    assert as_asked, "the test environment has numba"
