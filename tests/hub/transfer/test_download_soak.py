"""A short run of the download soak test; scripts/soak_downloads runs it thousands of times."""

from __future__ import annotations

import pytest

from tests.soak.download_soak import Soak

pytestmark = pytest.mark.push


@pytest.mark.parametrize(("what", "count"), [("cuts", 10), ("kills", 1), ("lies", 60), ("rivals", 1), ("disk", 5)])
def test_whatever_happens_to_a_download_the_model_is_whole_or_not_there(what: str, count: int) -> None:
    soak = Soak(seed=2)
    for case in range(count):
        soak.run(what, case)
    assert soak.tally.findings == []
    assert soak.tally.done[what] == count
