"""Tests of the tiers: which tests a run selects, and what its marks mean."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers import EXAMPLES, ROOMS, ROOT, Tier, chosen_tier, covering, examples, factors, leaves_out

SUITE = """
import pytest

def test_edit(): ...

@pytest.mark.push
def test_push(): ...

@pytest.mark.night
def test_night(): ...

@pytest.mark.push
@pytest.mark.cover(2)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(4))
def test_covered(a, b, c): ...

@pytest.mark.sample(3)
@pytest.mark.parametrize("a", range(9))
def test_sampled(a): ...

@pytest.mark.gpu
def test_elsewhere(): ...
"""


@given(
    st.lists(
        st.fixed_dictionaries({"a": st.sampled_from("xyz"), "b": st.sampled_from("uv"), "c": st.sampled_from("rst")})
    )
)
def test_every_pair_that_occurs_is_covered(cases: list[dict[str, str]]) -> None:
    def pairs(chosen: list[dict[str, str]]) -> set[tuple[tuple[str, str], ...]]:
        return {pair for case in chosen for pair in itertools.combinations(sorted(case.items()), 2)}

    kept = covering(cases, 2)
    assert pairs([cases[number] for number in kept]) == pairs(cases)


@pytest.mark.parametrize(("values", "strength", "most"), [((5, 5, 5), 2, 33), ((5, 5, 5), 1, 5), ((3, 3, 3, 3), 2, 12)])
def test_few_cases_cover_a_product(values: tuple[int, ...], strength: int, most: int) -> None:
    """The smallest sets that contain all pairs have 25 and 9 cases."""
    names = "abcd"
    product = [dict(zip(names, map(str, case), strict=False)) for case in itertools.product(*map(range, values))]
    assert len(covering(product, strength)) <= most


def test_elements_of_tuples_are_values() -> None:
    assert factors({"shape": (3, "x"), "level": "avx2"}) == {"shape0": "3", "shape1": "'x'", "level": "'avx2'"}


def test_property_tests_try_the_examples_of_the_tier(pytestconfig: pytest.Config) -> None:
    assert settings().max_examples == EXAMPLES[chosen_tier(pytestconfig)]
    assert examples(300) == 3 * settings().max_examples
    assert examples(1) == 5


@pytest.mark.push
def test_a_named_test_of_a_later_tier_is_deselected_and_not_unknown(copy: Path) -> None:
    run_suite(copy, "--night")
    (copy / "tests" / "test_other.py").write_text(SUITE)
    done = run_pytest(copy, "tests/test_other.py::test_night")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "1 deselected" in done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the suite's settings with SUITE as the only test file, and with unrecorded sources."""
    tests = tmp_path / "tests"
    (tests / "support" / "cli").mkdir(parents=True)
    for name in ("conftest.py", "support/tiers.py", "support/cli/forking.py", "night.json"):
        (tests / name).write_bytes((ROOT / "tests" / name).read_bytes())
    (tests / "kernels").mkdir()
    (tests / "kernels" / "test_suite.py").write_text(SUITE)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for room in ROOMS:
        (tmp_path / "llmrun" / room).mkdir(parents=True)
        (tmp_path / "llmrun" / room / "code.py").write_text("changed = True")
    return tmp_path


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )


def run_suite(folder: Path, *arguments: str) -> tuple[dict[str, int], str]:
    """Run SUITE and return the number of passed cases of each function, and the output."""
    done = run_pytest(folder, *arguments)
    done.check_returncode()
    names = re.findall(r"::test_(\w+)\S* PASSED", done.stdout)
    return {name: names.count(name) for name in names}, done.stdout


def test_files_of_later_tiers_are_known_by_their_marks() -> None:
    push = "import pytest\n\npytestmark = [pytest.mark.push, NEEDS_CHROMIUM]\n"
    assert [leaves_out(tier, push) for tier in Tier] == [True, False, False]
    assert [leaves_out(tier, "pytestmark = pytest.mark.night\n") for tier in Tier] == [True, True, False]
    assert [leaves_out(tier, "pytestmark = pytest.mark.gpu\n") for tier in Tier] == [True, True, True]
    unmarked = "pytestmark = pytest.mark.usefixtures('push')\n@pytest.mark.push\ndef test(): ...\n"
    assert not any(leaves_out(tier, unmarked) for tier in Tier)


EVERYTHING = {"edit": 1, "push": 1, "night": 1, "covered": 64, "sampled": 9}


@pytest.mark.night
def test_changed_rooms_are_tested_as_at_night_until_a_night_run(copy: Path) -> None:
    found, said = run_suite(copy)
    assert found == EVERYTHING
    assert (
        "llmrun/kernels and llmrun/formats/layouts and llmrun/model/plan and llmrun/formats/quants changed since"
        in said
    )
    for partial in (["tests/kernels"], ["-k", "test"], ["--collect-only"]):
        run_suite(copy, "--night", *partial)
        assert run_suite(copy)[0] == EVERYTHING  # a night run of some tests proves nothing
    assert run_suite(copy, "--night")[0] == EVERYTHING
    found, said = run_suite(copy)
    assert (found["edit"], found["push"], found.get("night")) == (1, 1, None)
    assert 16 <= found["covered"] < 24
    assert found["sampled"] == 3
    assert "changed since" not in said


@pytest.mark.push
def test_rooms_without_changes_do_not_pay_for_others(copy: Path) -> None:
    run_suite(copy, "--night")
    (copy / "llmrun" / "formats" / "quants" / "code.py").write_text("changed = 2")
    found, said = run_suite(copy)
    assert "night" not in found
    assert "collected 76 items" in said  # without test_night
    assert "llmrun/formats/quants changed since" in said


@pytest.mark.night
def test_a_night_that_fails_records_nothing(copy: Path) -> None:
    (copy / "tests" / "test_fault.py").write_text("def test_fault(): assert False")
    before = (copy / "tests" / "night.json").read_bytes()
    with pytest.raises(subprocess.CalledProcessError):
        run_suite(copy, "--night")
    assert (copy / "tests" / "night.json").read_bytes() == before
