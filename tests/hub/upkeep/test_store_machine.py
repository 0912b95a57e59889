"""Tests of a model store against a plain model of it; `scripts/soak hub` runs longer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.support.hub.store_machine import StoreMachine

pytestmark = pytest.mark.night

StoreMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase
