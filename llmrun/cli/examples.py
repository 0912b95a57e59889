"""Lines to type: what the help of each command ends with."""

from __future__ import annotations

EXAMPLES: dict[str, str] = {  # a line each
    "chat": """\
llmrun chat
llmrun chat qwen3:4b --continue
llmrun chat ./file.gguf -s "Be brief.\"""",
    "generate": """\
llmrun generate "Why is the sky blue?"
git diff | llmrun generate "What does this change?" -
llmrun generate -m qwen3:4b --json --temp 0 "Name a colour.\"""",
    "bench": """\
llmrun bench -m qwen3:4b
llmrun bench -m ./a.gguf,./b.gguf -p 128,1024 -t 1-4
llmrun bench compare last~1 last --fail-above 5%""",
    "bench history": """\
llmrun bench history
llmrun bench history last~1 -o md
llmrun bench history last --html page.html""",
    "bench compare": """\
llmrun bench compare last~1 last
llmrun bench compare before.json after.json --fail-above 5%""",
    "fit": """\
llmrun fit qwen3:8b
llmrun fit hf:org/repo -c 32768 --kv-type q8_0""",
    "pull": """\
llmrun pull qwen3:4b hf:org/repo:Q5_K_M
llmrun pull --dry-run qwen3:4b
llmrun pull --lock qwen3:4b""",
    "list": """\
llmrun list
llmrun list --json""",
    "show": """\
llmrun show qwen3:4b
llmrun show ./file.gguf --template""",
    "rm": """\
llmrun rm qwen3:4b hf:org/repo:Q8_0
llmrun rm --dry-run qwen3:4b""",
    "verify": """\
llmrun verify
llmrun verify ./file.gguf""",
    "prune": """\
llmrun prune --dry-run
llmrun prune org/repo""",
    "doctor": """\
llmrun doctor
llmrun doctor --offline --json""",
}
