"""Tests of probing a chat template for its thinking switch and tags."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from time import thread_time

import pytest

from llmrun.engine.templates.jinja import render
from llmrun.engine.templates.probing import probe
from llmrun.engine.templates.tool_format import TemplateAbilities, ThinkingTags
from tests.support.growth import TIMES, growth
from tests.support.models.downloads import llama_cpp_source
from tests.support.templates.template_runs import PROCESS

FOLDER = llama_cpp_source() / "vendor/llama.cpp/models/templates"
THINK = ("<think>", "</think>")
COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
FINAL = "<|start|>assistant<|channel|>final<|message|>"

# Read from the templates by hand: the values that switch thinking on and off, and the tags.
REAL: dict[str, tuple[dict[str, object], dict[str, object], tuple[str, ...] | None]] = {
    "Apertus-8B-Instruct": (
        {"enable_thinking": True},
        {"enable_thinking": False},
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "Apriel-1.6-15b-Thinker-fixed": ({}, {}, ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
    "ByteDance-Seed-OSS": ({"thinking_budget": -1}, {"thinking_budget": 0}, ("<seed:think>", "</seed:think>")),
    "Cohere2MoE": ({"reasoning": True}, {"reasoning": False}, (*COHERE, "<|START_TEXT|>", "<|END_TEXT|>")),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        {"enable_thinking": True},
        {"enable_thinking": False},
        (*COHERE, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "GLM-4.6": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "GLM-4.7-Flash": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "HuggingFaceTB-SmolLM3-3B": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "Kimi-K2-Thinking": ({}, {}, THINK),
    "Kimi-K3": (
        {"thinking": True},
        {"thinking": False},
        (
            *("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            *("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ),
    ),
    "LFM2.5-8B-A1B": ({}, {}, THINK),
    "MiMo-VL": ({}, {}, None),
    "MiniMax-M2": ({}, {}, THINK),
    "MiniMax-M3": ({"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}, ("<mm:think>", "</mm:think>")),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "NVIDIA-Nemotron-Nano-v2": ({}, {}, THINK),
    "Qwen-QwQ-32B": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "Qwen-Qwen2.5-7B-Instruct": ({}, {}, None),
    "Qwen-Qwen3-0.6B": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "Reka-Edge": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ({}, {}, THINK),
    "deepseek-ai-DeepSeek-V3.1": ({"thinking": True}, {"thinking": False}, THINK),
    "deepseek-ai-DeepSeek-V4": ({"thinking": True}, {"thinking": False}, THINK),
    "google-gemma-2-2b-it": ({}, {}, None),
    "google-gemma-4-31B-it": (
        {"enable_thinking": True},
        {"enable_thinking": False},
        ("<|channel>thought", "<channel|>"),
    ),
    "ibm-granite-granite-3.3-2B-Instruct": (
        {"thinking": True},
        {"thinking": False},
        (*THINK, "<response>", "</response>"),
    ),
    "inclusionai-ling-3.0-flash": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "llama-cpp-rwkv-world": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "meta-llama-Llama-3.1-8B-Instruct": ({}, {}, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ({}, {}, ("[THINK]", "[/THINK]")),
    "muse-glimmer": ({}, {}, ("to=self<|message|>", "<|eom|>", "<|start|>assistant to=user<|message|>")),
    "openai-gpt-oss-120b": ({}, {}, ("<|channel|>analysis<|message|>", "<|end|>", FINAL)),
    "poolside-Laguna-S-2.1": ({"enable_thinking": True}, {"enable_thinking": False}, THINK),
    "tencent-Hy3": (
        {"reasoning_effort": "high"},
        {"reasoning_effort": "no_think"},
        ("<think:opensource>", "</think:opensource>"),
    ),
    "upstage-Solar-Open-100B": (
        {"reasoning_effort": "high"},
        {"reasoning_effort": "low"},
        ("<|think|>", "<|end|>", "<|begin|>assistant<|content|>"),
    ),
}


def source_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def real(name: str) -> TemplateAbilities:
    return probe(source_of(name))


@pytest.mark.push
@pytest.mark.parametrize("name", REAL)
def test_a_real_templates_switch_and_tags_are_found(name: str) -> None:
    on, off, tags = REAL[name]
    found = real(name)
    assert (found.reasoning_on, found.reasoning_off) == (on, off)
    assert found.thinking_tags == (ThinkingTags(*tags) if tags else None)


@pytest.mark.push
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_a_template_that_asks_for_a_switch_by_its_usual_name_has_one(name: str) -> None:
    source = source_of(name)
    asks = "if enable_thinking" in source or "not enable_thinking" in source or "thinking_mode ==" in source
    assert bool(real(name).reasoning_off) >= asks


def prompt(source: str, **variables: object) -> str:
    messages = [{"role": "user", "content": "Hi <think>"}]
    given = {"bos_token": "", "eos_token": "", "tools": None, "add_generation_prompt": True}
    return render(source, {**given, **variables, "messages": messages}, datetime.now())


@pytest.mark.push
@pytest.mark.parametrize("name", [name for name, (_, off, _) in REAL.items() if off])
def test_the_switch_changes_the_prompt(name: str) -> None:
    source = source_of(name)
    found = real(name)
    off = prompt(source, **found.reasoning_off)
    assert prompt(source, **found.reasoning_on) != off
    tags = found.thinking_tags
    assert tags is not None
    assert not off.rstrip().endswith(tags.opening)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA-Nemotron-Nano-v2", "/no_think"),
        ("Qwen-Qwen3-0.6B", ""),  # it has a variable
        ("Kimi-K2-Thinking", ""),
        ("ibm-granite-granite-4.0", ""),
    ],
)
def test_a_word_that_switches_thinking_off_is_found(name: str, word: str) -> None:
    assert real(name).off_word == word


@pytest.mark.push
def test_the_variants_of_qwens_template_have_the_same_switch() -> None:
    """Qwen3.5 0.8B and 2B think only if asked, and Qwen3.6 has a second variable that keeps past thinking."""
    source, off = source_of("Qwen3.5-4B"), "{{- '<think>\\n\\n</think>\\n\\n' }}"
    on = "{{- '<think>\\n' }}"
    switch = "enable_thinking is defined and enable_thinking is "
    small = source.replace(switch + "false", switch + "true")
    small = small.replace(off, "OFF").replace(on, off).replace("OFF", on)
    later = source.replace("if loop.index0 > ns.last", "if preserve_thinking or loop.index0 > ns.last")
    assert source not in (small, later)
    for variant in (small, later):
        found = probe(variant)
        assert (found.reasoning_on, found.reasoning_off) == ({"enable_thinking": True}, {"enable_thinking": False})
        assert found.is_off_by_default == (variant == small)
        assert found.thinking_tags == ThinkingTags(*THINK)


# --- small templates


def test_a_word_that_is_only_printed_is_no_switch() -> None:
    source = "Reasoning: {{ reasoning_effort or 'high' }}{{ messages[0].content }}"
    assert probe(source).reasoning_off == {}


def test_what_only_changes_past_thinking_is_no_switch() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {% if keep_thinking and m.thinking %}<think>{{ m.thinking }}</think>"
        "{% endif %}{{ m.content }}\n{% endfor %}assistant: "
    )
    found = probe(source)
    assert (found.reasoning_on, found.reasoning_off, found.thinking_tags) == ({}, {}, ThinkingTags(*THINK))


def test_a_switch_that_must_be_set_to_end_thinking_needs_nothing_to_begin_it() -> None:
    source = "{{ messages[0].content }}<think>{% if reasoning_effort == 'none' %}</think>{% endif %}"
    found = probe(source)
    assert (found.reasoning_on, found.reasoning_off) == ({}, {"reasoning_effort": "none"})
    assert found.thinking_tags == ThinkingTags(*THINK)


def test_parts_written_out_as_they_are_show_no_tags() -> None:
    assert probe("{% for m in messages %}{{ m.content }}{% endfor %}").thinking_tags is None


@pytest.mark.parametrize("source", ["{% if", "{{ raise_exception('never') }}", "", "{{ 1 / 0 }}"])
def test_a_template_that_renders_nothing_can_nothing(source: str) -> None:
    assert PROCESS.abilities(source) == TemplateAbilities()


@pytest.mark.push
def test_the_process_finds_what_probing_finds() -> None:
    for name in ("Qwen-Qwen3-0.6B", "ByteDance-Seed-OSS", "openai-gpt-oss-120b"):
        assert PROCESS.abilities(source_of(name)) == real(name)


@pytest.mark.push
def test_a_template_that_takes_its_time_is_not_tried_for_ever() -> None:
    """Each of the many renderings takes about 0.1 s, so probing would take many seconds without the limit."""
    loop = "{% for i in range(25) %}{% for j in range(90000) %}{% if j %}{% endif %}{% endfor %}{% endfor %}"
    began = thread_time()
    slots = "".join(f"{{{{ m.thought_{i} }}}}{{% if thinking_{i} == 'x' %}}{{% endif %}}" for i in range(20))
    probe(loop + slots, limit_s=0.2)
    assert thread_time() - began < 1.5


@pytest.mark.parametrize("opening", ["'<x>' + 'w' * SIZE + '<y>'", "'<' + 'w' * 50 + '> ' * SIZE"])
def test_a_tag_without_end_is_none_and_makes_nothing_slow(opening: str) -> None:
    source = (
        "{% for m in messages %}{% if m.reasoning_content %}{{ " + opening + " + m.reasoning_content + '</t>' }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )

    def look_for(size: int) -> None:
        assert probe(source.replace("SIZE", str(size))).thinking_tags is None

    assert growth(look_for, 400_000) < 3 * TIMES


def test_tags_of_a_sensible_length_are_found_beside_it() -> None:
    source = (
        "{% for m in messages %}{% if m.reasoning_content %}{{ '<x>' + 'w' * 30 + '<y>' + m.reasoning_content + "
        "'</t>' }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tags = probe(source).thinking_tags
    assert tags
    assert tags.opening == f"<x>{'w' * 30}<y>"
