"""A template that would run for ever or eat the memory is refused, in one line; what is only large is not."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from time import thread_time
from typing import Any

import pytest

from llmrun.engine.sandbox import render
from llmrun.engine.templating import budget as budgets
from llmrun.engine.templating import source as sources
from llmrun.engine.templating.budget import Budget, OverBudget
from llmrun.errors import TemplateRefused
from tests.support.models.downloads import llama_cpp_source
from tests.support.templates.hostile_templates import HOSTILE
from tests.support.templates.measured_templates import Measured, Renderers, measure
from tests.support.templates.template_drafts import hostile_draft

pytestmark = pytest.mark.slow

DRAFTS = 400  # scripts/soak_templates renders a hundred thousand
SEED = 2


def rendered(source: str, **variables: Any) -> str:
    return render(source, "t.jinja", variables)


def refusal(source: str, **variables: Any) -> str:
    with pytest.raises(TemplateRefused) as refused:
        rendered(source, **variables)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 300
    assert refused.value.exit_code == 9
    return message


# --- hostile templates, ten to a process; one of ten that is not well is measured again in a process of its own


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    return dict(zip(HOSTILE, measure([*HOSTILE.values()], batch=10), strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_within_2_seconds_and_256_mb(name: str, measured: dict[str, Measured]) -> None:
    assert measured[name].outcome == "refused"
    assert measured[name].well, measured[name]
    assert "\n" not in measured[name].said


def test_random_ones_end_in_text_or_are_refused() -> None:
    paths = sorted((llama_cpp_source() / "vendor/llama.cpp/models/templates").glob("*.jinja"))
    real = [path.read_text(encoding="utf-8") for path in paths]
    results = measure([hostile_draft(SEED, case, real) for case in range(DRAFTS)], batch=50)
    assert [(case, result) for case, result in enumerate(results) if not result.well] == []
    # Drafts that were all broken at the first tag, or all harmless, would test nothing.
    assert sum(result.outcome == "text" for result in results) > DRAFTS // 10
    assert sum("chat template refused" in result.said for result in results) > DRAFTS // 10


def test_a_process_that_is_killed_or_eats_memory_is_seen() -> None:
    """The measure itself: what these tests rest on."""
    with Renderers() as renderers:
        [small] = renderers.run(["{{ 'a' }}"])
        [large] = renderers.run(["{{ ('a' * 12000000) | length }}"])
        assert (small.outcome, large.said) == ("text", "12000000")
        assert small.peak + 10_000_000 < large.peak < small.peak + 40_000_000


# --- what is said

SAID = {
    "a method": (
        "a\n\n{{ 'x'.center(400000000) }}",
        "line 3: center(400000000) would make 400,000,000 bytes, limit 16,777",
    ),
    "a filter": ("{{ 'x' | center(400000000) }}", "line 1: center(400000000) would make 400,000,000 bytes"),
    "an operator": ("{{ 'a' * 10**9 }}", "line 1: the operator * would make 1,000,000,000 bytes"),
    "steps": (
        "{% for i in range(99999) %}\n{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "line 2: it takes more than",
    ),
    "depth": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "macros call each other more than 100 deep"),
    "held": (
        "{% set ns = namespace(l=[]) %}{% for i in range(99) %}{% set ns.l = [ns.l, 'a' * 8000000] %}{% endfor %}",
        "bytes at once, limit 67,",
    ),
    "output": (
        "{% set a = 'a' * 10**6 %}{% for i in range(99) %}{{ a }}{% endfor %}",
        "the text it makes has more than",
    ),
    "tokens": ("\n" + "{{ 1 }}" * 9000, "line 2: it has more than 20,000 tokens"),
    "brackets": ("\n{{ " + "(" * 30 + ")" * 30 + " }}", "line 2: it is nested too deeply"),
    "tags": ("{% if 1 %}" * 31 + "{% endif %}" * 31, "line 1: it is nested too deeply"),
    "expression": ("{{ 1" + " + 1" * 100 + " }}", "line 1: an expression is nested more than 80 deep"),
    "for in for": ("{% for a in b %}" * 25 + "{% endfor %}" * 25, "t.jinja: too many statically nested blocks"),
    "source": ("a" * (sources.LONGEST_SOURCE + 1), "its source has 131,073 characters, limit 131,072"),
    "range": ("{{ range(10**7) }}", "a range of 10,000,000 numbers, limit 100,000"),
    "integer": ("{{ 2**100 * 2**100 }}", "an integer of 201 bits, limit 128"),
    "width by argument": ("{{ '%*d' % (9, 1) }}", "a % format has a field that is not supported: '%*d'"),
    "key": ("{{ {(1, 2): 3} }}", "a tuple as a key"),
}


@pytest.mark.parametrize("name", SAID)
def test_a_refusal_says_what_was_too_much_and_where(name: str) -> None:
    source, words = SAID[name]
    message = refusal(source)
    assert message.startswith("chat template ")
    assert words in message


def test_a_conversation_too_large_is_not_the_templates_fault() -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    assert refusal("{{ x }}", x=deep).startswith("conversation is too large for a chat template: t.jinja: ")
    assert refusal("{{ x }}", x=[[0] * 1000] * 1001).startswith("conversation is too large")


# --- what is only large


@pytest.mark.parametrize("letter", ["a", "\n", "é", "🙂"])
def test_a_message_of_ten_million_characters_is_rendered(letter: str) -> None:
    content = letter * 10_000_000
    source = (
        "{% for m in messages %}{% if 'x' in m.content or m.content.startswith('</think>') %}{% break %}{% endif %}"
        "{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + '｜' }}{{ m.content | trim ~ '' }}{% endfor %}"
    )
    assert len(rendered(source, messages=[{"role": "user", "content": content}])) > 10_000_000
    assert rendered("{{ m | replace('b', 'cc') | upper | length }}", m=content) == "10000000"
    assert rendered("{{ m | tojson }}", m=letter * 2_000_000)[-1] == '"'


def test_a_text_may_be_built_of_a_thousand_messages_piece_by_piece() -> None:
    """Its 400 MB of intermediate texts are not held, and so not counted."""
    source = (
        "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% set ns.out = ns.out ~ m.role ~ ': ' %}{% set ns.out = ns.out + m.content + '\n' %}{% endfor %}{{ ns.out }}"
    )
    messages = [{"role": "user", "content": "x" * 300}] * 1000
    assert rendered(source, messages=messages) == ("user: " + "x" * 300 + "\n") * 1000


def test_looking_back_through_a_thousand_messages_is_allowed() -> None:
    source = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for i in range(loop.index0, -1, -1) %}"
        "{% if ns.n %}{% if messages[i].role == 'user' %}{% set ns.n = i %}{% endif %}{% endif %}{% endfor %}"
        "{{ ns.n }},{% endfor %}"
    )
    assert rendered(source, messages=[{"role": "user", "content": "x"}] * 1000) == "0," * 1000


# --- how it is counted


def test_values_that_nobody_holds_any_more_are_not_counted() -> None:
    account = Budget(0, 0, thread_time())
    for _ in range(100):
        account.keep("x" * 1_000_000)
    held: list[str] = []
    with pytest.raises(OverBudget, match="at once"):
        held.extend(account.keep("x" * 1_000_000) for _ in range(100))
    assert 60 < len(held) < 90


def test_a_list_that_is_gone_lets_go_of_its_items() -> None:
    account = Budget(0, 0, thread_time())
    for _ in range(300):
        account.keep([account.keep("x" * 500_000), account.keep("y" * 500_000)])


def test_pieces_of_a_list_that_is_gone_are_counted() -> None:
    account = Budget(0, 0, thread_time())
    held: list[str] = []
    with pytest.raises(OverBudget, match="at once"):
        held.extend(account.keep_all(["x" * 1_000_000, "y"])[0] for _ in range(100))
    assert 60 < len(held) < 90


def test_one_value_passed_many_times_is_counted_once() -> None:
    account = Budget(0, 0, thread_time())
    value = "x" * 10_000_000
    for _ in range(100):
        account.keep(value)


def test_the_clock_stops_what_the_steps_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SECONDS", 0.0)
    loop = "{% for i in range(99999) %}{% endfor %}"
    assert "line 1: it takes longer than 0.0 s" in refusal(loop)
    assert rendered("{{ 1 }}") == "1"  # too short to look at the clock


def test_a_rendering_leaves_nothing_for_the_next() -> None:
    """Steps, bytes and depth are an account of one rendering."""
    source = (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
        + "{% for i in range(9999) %}{% endfor %}"
    )
    for _ in range(50):
        assert rendered(source) == ""
    assert "deep" in refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    assert rendered(source) == ""


def test_threads_render_with_an_account_each() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for i in range(20000) %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ x }}"
    )
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda x: rendered(source, x=x), range(24)))
    assert texts == [f"20000{x}" for x in range(24)]


def test_nothing_is_computed_while_compiling() -> None:
    """Constant folding would run these before any limit holds."""
    hidden = (
        "'a' * 10**10",
        "'a' | center(100000)",
        "['a', 'b'] | join",
        "2 ** 100",
        "[1, 2][0:1]",
        "'%s' % 1",
        "1 ~ 2",
    )
    code = sources.compile_source(_compiler(), "".join(f"{{{{ {expression} }}}}" for expression in hidden))
    texts = [constant for constant in _constants(code) if isinstance(constant, str)]
    assert not [text for text in texts if len(text) > 1000 or text in ("ab", "12", "1", str(2**100), "[1]")]
    assert rendered("{% if false %}{{ 'a' * 10000000000 }}{{ 'a' | center(100000000000) }}{% endif %}b") == "b"


def test_a_template_prints_no_warnings_of_pythons_compiler() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rendered("{{ 'a'[0:1] }}{{ 1 == 1 }}{{ [1][0] }}{{ 1 is odd }}") == "aTrue1True"
        assert "cannot be called" in refusal("{{ 1() }}")


def _compiler() -> Any:
    from llmrun.engine.templating.environment import ChatSandbox

    return ChatSandbox()


def _constants(code: Any) -> list[Any]:
    found = []
    for constant in code.co_consts:
        found += _constants(constant) if hasattr(constant, "co_consts") else [constant]
    return found
