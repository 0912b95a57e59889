"""A real Ray cluster with token authentication."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import NetworkError
from llmrun.jobs.batching.workers.ray_cluster import RayProcess
from tests.support.batching.ray_clusters import TestCluster, cluster, open_with_token

pytestmark = pytest.mark.night
TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def ray() -> Iterator[TestCluster]:
    with cluster(1, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}) as running:
        yield running


@pytest.mark.parametrize(
    "variables",
    [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN[::-1]}],
    ids=["no token", "another token"],
)
def test_the_cluster_refuses_other_tokens(
    ray: TestCluster, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NetworkError, match="the cluster refuses the token") as raised:
        RayProcess.connected(ray.address)
    assert "RAY_AUTH_MODE=token" in raised.value.hint


def test_the_token_opens_the_cluster(ray: TestCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The node then says that it was started with a token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert open_with_token(ray.address, tmp_path)["id"] == "a-model"
