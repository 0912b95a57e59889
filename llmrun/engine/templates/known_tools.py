"""Tool-call formats that templates do not reveal: they render no past calls, or write calls in one of two ways."""

from __future__ import annotations

from llmrun.engine.templates.tool_format import INDEX, JSON_TYPES, NAME, ArgumentFormat, ToolCallFormat, ValueForm

_KIMI_K2 = ToolCallFormat(
    f"<|tool_call_begin|>functions.{NAME}:{INDEX}<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    ArgumentFormat(),
    section_start="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    id_form=f"functions.{NAME}:{INDEX}",
)
_LFM2 = ToolCallFormat(
    f"{NAME}(",
    ")",
    ArgumentFormat(
        "items",
        separator=", ",
        forms=dict.fromkeys(JSON_TYPES, ValueForm("=", "")),
        strings="python",
        scalars="python",
        arrays="python",
        objects="python",
    ),
    section_start="<|tool_call_start|>[",
    separator=", ",
    section_end="]<|tool_call_end|>",
)
_GRANITE_3 = ToolCallFormat(
    f'{{"name": "{NAME}", "arguments": ',
    "}",
    ArgumentFormat(),
    section_start="<|tool_call|>[",
    separator=", ",
    section_end="]",
)
# A template that contains all of these texts, shows tools and does not render past calls has this format. Kimi's
# templates render calls only outside a sandbox, and LFM2's and Granite 3's do not render them at all.
_BY_TEXTS = (
    (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), _KIMI_K2),
    (("List of tools: ", "<|im_start|>", "<|tool_list_start|>"), _LFM2),
    (("List of tools: [", "<|im_start|>"), _LFM2),
    (("<|tool_call|> followed by a JSON list of tools",), _GRANITE_3),
)
# gpt-oss writes the recipient before or after the channel; its template writes it before.
_OTHER_STARTS = {
    f"to=functions.{NAME}<|channel|>commentary json<|message|>": (
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
        f"<|channel|>commentary to=functions.{NAME}<|message|>",
    )
}


def known_format(source: str) -> ToolCallFormat | None:
    """Return the format of a template that shows tools but does not render calls, or None."""
    return next((found for texts, found in _BY_TEXTS if all(text in source for text in texts)), None)


def other_starts(call_start: str) -> tuple[str, ...]:
    """Return the texts that models of a family write instead of the one in their template."""
    return _OTHER_STARTS.get(call_start, ())
