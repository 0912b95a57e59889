"""Tests of chat templates: which one is used, its inputs, and one-line errors (TemplateRefused) for all failures."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from llmrun.backends.scripted import ScriptedBackend, ScriptedTokenizer
from llmrun.base.errors import BadGGUF, TemplateRefused, UsageError
from llmrun.engine.requests import ChatPrompt
from llmrun.engine.templates.chat_template import FAMILIES, ChatTemplate, choose_template
from tests.support.templates.template_runs import PROCESS

INFO = replace(ScriptedBackend().info, name="some model")
TOKENIZER = ScriptedTokenizer()
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
]


def rendered(source: str, **conversation: Any) -> str:
    prompt = ChatPrompt(**{"messages": CONVERSATION, **conversation})
    return ChatTemplate(source, "user", "t.jinja").render(prompt, TOKENIZER, PROCESS)


class OtherEos(ScriptedTokenizer):
    """A base model's vocabulary, which has the chat tokens but ends its texts with another token."""

    eos_id: int | None = 257


# --- the chosen template


def test_the_callers_template_wins_over_the_models_and_that_over_the_familys() -> None:
    info = replace(INFO, metadata={"tokenizer.chat_template": "own"})
    assert choose_template(info, TOKENIZER, "given") == ChatTemplate("given", "user", "--chat-template")
    assert choose_template(info, TOKENIZER, None) == ChatTemplate("own", "model", "tokenizer.chat_template")
    chosen = choose_template(INFO, TOKENIZER, None)
    assert chosen is not None
    assert (chosen.origin, chosen.name) == ("fallback", "chatml")


def test_a_base_model_has_no_template() -> None:
    assert choose_template(INFO, OtherEos(), None) is None
    assert choose_template(replace(INFO, metadata={"tokenizer.chat_template": " \n"}), OtherEos(), None) is None


@pytest.mark.parametrize("metadata", [{"general.name": "Foo-7B Instruct"}, {"general.finetune": "it"}])
def test_a_name_can_say_that_a_model_chats(metadata: dict[str, str]) -> None:
    chosen = choose_template(replace(INFO, metadata=metadata), OtherEos(), None)
    assert chosen is not None
    assert chosen.name == "chatml"


@pytest.mark.parametrize(
    ("controls", "name", "family"),
    [
        (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "Meta Llama 3 8B Instruct", "llama-3"),
        (("<start_of_turn>", "<end_of_turn>"), "gemma-2-2b-it", "gemma"),
        (("<|user|>", "<|assistant|>", "<|end|>"), "Phi-3-mini-4k-instruct", "phi-3"),
        ((), "Mistral-7B-Instruct-v0.2", "mistral"),
        ((), "Llama-2-7b-chat-hf", "llama-2"),
        ((), "zephyr-7b-beta", "zephyr"),
        ((), "TinyLlama-1.1B-Chat-v1.0", "zephyr"),
        ((), "Llama-2-7b-hf", None),
        ((), "Mistral-7B-v0.1", None),
    ],
)
def test_the_family_is_told_by_vocabulary_and_name(controls: tuple[str, ...], name: str, family: str | None) -> None:
    class Vocabulary(OtherEos):
        """A vocabulary without ChatML's tokens, so the lookup fails."""

        def token_text(self, token_id: int) -> str:
            text = super().token_text(token_id)
            return "unused" if text.startswith("<|im_") else text

    chosen = choose_template(replace(INFO, name=name), Vocabulary(more_control_tokens=controls), None)
    assert (chosen.name if chosen else None) == family


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama-3",
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
            "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "phi-3",
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n"
            "<|user|>\nAnd now?<|end|>\n<|assistant|>\n",
        ),
        (
            "zephyr",
            "<|system|>\nBe brief.<|im_end|>\n<|user|>\nHi<|im_end|>\n<|assistant|>\nHello!<|im_end|>\n"
            "<|user|>\nAnd now?<|im_end|>\n<|assistant|>\n",
        ),
        ("mistral", "[INST] Be brief.\n\nHi [/INST] Hello!<|im_end|>[INST] And now? [/INST]"),
        (
            "llama-2",
            "<|bos|>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! <|im_end|><|bos|>[INST] And now? [/INST]",
        ),
    ],
)
def test_a_familys_template_writes_its_conversations(name: str, expected: str) -> None:
    [family] = [family for family in FAMILIES if family.name == name]
    assert rendered(family.source) == expected


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_a_template_that_is_no_string_is_a_bad_file(key: str) -> None:
    with pytest.raises(BadGGUF, match=key):
        choose_template(replace(INFO, metadata={key: 7}), TOKENIZER, None)


def test_the_files_tool_template_is_for_conversations_with_tools() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools[0].name }}"}
    template = choose_template(replace(INFO, metadata=metadata), TOKENIZER, None)
    assert template is not None
    assert template.render(ChatPrompt(CONVERSATION), TOKENIZER, PROCESS) == "plain"
    assert template.render(ChatPrompt(CONVERSATION, tools=[{"name": "get"}]), TOKENIZER, PROCESS) == "get"


# --- the template's variables


def test_it_gets_the_fields_transformers_gives() -> None:
    assert rendered("{{ bos_token }} {{ eos_token }} {{ add_generation_prompt }}") == "<|bos|> <|im_end|> True"
    assert rendered("{{ tools is none }} {{ messages | length }} {{ messages[1].content }}") == "True 4 Hi"
    assert rendered("{{ x }}{{ y }}", template_kwargs={"x": 1, "y": [None]}) == "1[None]"


def test_the_functions_and_filters_of_transformers_are_there() -> None:
    value = {"b": "é<'&>", "a": 1}
    assert rendered("{{ v | tojson }}", template_kwargs={"v": value}) == '{"b": "é<\'&>", "a": 1}'
    assert rendered("{{ v | tojson(indent=1, sort_keys=true) }}", template_kwargs={"v": {"b": 2, "a": 1}}) == (
        '{\n "a": 1,\n "b": 2\n}'
    )
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert rendered("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert rendered("a{% generation %}{{ 'b' }}{% endgeneration %}c") == "abc"
    assert rendered("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"
    assert rendered("  {% if true %}\n    a\n  {% endif %}\n") == "    a\n"  # trim_blocks and lstrip_blocks


def test_every_string_of_others_is_protected_whereever_it_hides() -> None:
    bad = "<|im_end|>"
    text = rendered(
        "{{ messages | tojson }}{{ tools | tojson }}{{ note }}{{ bos_token }}",
        messages=[{"role": "user", "content": [{"type": "text", "text": bad}], bad: (bad,)}],
        tools=[{"function": {"name": bad, "parameters": {bad: {"enum": [bad, 1]}}}}],
        template_kwargs={"note": bad},
    )
    assert bad not in text
    assert TOKENIZER.unprotect(text).count(bad) == 7
    assert text.endswith("<|bos|>")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
def test_extra_variables_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        rendered("", template_kwargs={name: "x"})


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_past_thinking_has_the_names_transformers_gives_it(key: str) -> None:
    messages = [{"role": "assistant", "content": "Hi", key: "Hm <|im_end|>"}]
    text = rendered("{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}", messages=messages)
    assert TOKENIZER.unprotect(text) == "Hm <|im_end|>|Hm <|im_end|>"
    assert "<|im_end|>" not in text


# --- continuing an answer

BEGUN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>\n{% endfor %}"


def begun(source: str, content: Any) -> str:
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": content}]
    return TOKENIZER.unprotect(rendered(source, messages=messages, add_generation_prompt=False))


@pytest.mark.parametrize("content", ["Well, ", "Well,", "", " \n", "CONTINUE_FINAL_MESSAGE_TAG <|im_end|> "])
def test_an_answer_to_be_continued_ends_the_text(content: str) -> None:
    assert begun(BEGUN, content) == "[user] Go<|im_end|>\n[assistant] " + content


def test_a_template_that_trims_may_trim_it() -> None:
    assert begun(BEGUN.replace("m.content", "m.content | trim"), " Well, ") == "[user] Go<|im_end|>\n[assistant] Well,"


def test_the_last_text_of_its_parts_is_continued() -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    source = "{% for part in messages[1].content %}{{ part.text }}.{% endfor %}"
    assert begun(source, parts) == "One.Two"


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[1].content.split('</think>')[-1] }}"])
def test_an_answer_the_template_leaves_out_cannot_be_continued(source: str) -> None:
    with pytest.raises(TemplateRefused, match=r"drops part of the answer that is being continued: t\.jinja"):
        begun(source, "hm</think>Well")


def test_a_question_is_not_continued() -> None:
    messages = [{"role": "user", "content": "Go"}]
    assert rendered(BEGUN, messages=messages, add_generation_prompt=False) == "[user] Go<|im_end|>\n"


# --- restrictions

REFUSED = {
    "raise_exception": ("{{ raise_exception('only\nuser  roles') }}", "t.jinja: only user roles"),
    "syntax": ("a\nb\n{% if %}", "line 3"),
    "unknown tag": ("{% foo %}", "unknown tag 'foo'"),
    "undefined": ("a\n{{ foo.bar }}", "line 2: 'foo' is undefined"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "import": ("{% import 'x' as y %}", "line 1: no loader"),
    "mutation": ("{{ messages.append(1) }}", "is unsafe"),
    "escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "escape by a filter": ("{{ (''|attr('__class__')).__mro__ }}", "unsafe"),
    "format escape": ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    "private attribute": ("{{ raise_exception.__globals__.x }}", "unsafe"),
    "clock": ("{{ strftime_now.__self__.x }}", "unsafe"),
    "not callable": ("{{ messages() }}", "not callable"),
    "float overflow": ("{{ 10.0 ** 1000 }}", "t.jinja"),
    "not json": ("{{ nothing | tojson }}", "not JSON serializable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_fails_is_refused_in_one_line(name: str) -> None:
    source, words = REFUSED[name]
    with pytest.raises(TemplateRefused) as refused:
        rendered(source)
    message = str(refused.value)
    assert words in message
    assert "t.jinja" in message
    assert "\n" not in message
    assert len(message) < 300
    assert refused.value.exit_code == 9


@pytest.mark.push
def test_a_conversation_nested_too_deeply_is_refused() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateRefused, match="nested too deeply"):
        rendered("{{ messages }}", messages=[{"role": "user", "content": nested}])


def test_a_conversation_that_is_no_json_is_refused() -> None:
    with pytest.raises(TemplateRefused, match=r"t\.jinja: Object of type object is not JSON serializable"):
        rendered("{{ x }}", template_kwargs={"x": object()})


@pytest.mark.push
def test_no_template_is_run_by_the_process_that_asks() -> None:
    code = (
        "import sys; from llmrun.engine.templates.chat_template import TemplateProcess;"
        "print(TemplateProcess().render('{{ 1 }}', 't', {})); assert 'jinja2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"
