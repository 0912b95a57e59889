#!/usr/bin/env python3
"""Measure how often lookup drafts are right on text that people wrote. No model runs; drafts are compared with files.

    scripts/measure_acceptance.py MODEL.gguf [--pairs N]

Each pair of a file before and after a commit of this repository is an edit: the old file is the prompt, and the new
file is the answer. The standard library's sources and this repository's documents are also used as answers without a
prompt, which shows what lookup does where nothing has to be copied. Text by people is used because the small models
that tests can run repeat themselves, which would make lookup look better than it is.

The first table has the tokens per step with drafts of 15 tokens, and the share of drafted tokens that were right. The
second table has the acceptance by match length, from which `_EXPECTED` in engine/drafting/lookup.py was chosen.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llmrun.engine.drafting.lookup import LookupSource  # noqa: E402
from llmrun.engine.requests import Request, TokenPrompt  # noqa: E402
from llmrun.formats.gguf.reader import open_gguf  # noqa: E402
from llmrun.model.tokenizers.kinds import load_tokenizer  # noqa: E402

DRAFT = 15  # tokens
LONGEST = 4000  # tokens of an answer, about what a model with a context of 8,192 tokens can rewrite
LEAST = 100  # tokens of an answer


class Counts:
    """The drafts of one kind of text: tokens, steps, and for each match length [right, tried]."""

    def __init__(self) -> None:
        self.answers = self.tokens = self.steps = self.drafted = self.accepted = 0
        self.by_length: dict[int, list[int]] = {}

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Draft an answer from its own beginning and the prompt, and count what was right."""
        drafter = LookupSource().drafter(Request(TokenPrompt(prompt)))
        tokens, at = list(prompt), 0
        while at < len(answer):
            draft = drafter.draft(tokens, min(DRAFT, len(answer) - at - 1), lambda kinds: True)
            right = 0
            while right < len(draft.tokens) and draft.tokens[right] == answer[at + right]:
                right += 1
            for index, kind in enumerate(draft.kinds[: right + 1]):
                count = self.by_length.setdefault(kind[1], [0, 0])
                count[0] += index < right
                count[1] += 1
            tokens += answer[at : at + right + 1]
            at += right + 1
            self.steps += 1
            self.drafted += len(draft.tokens)
            self.accepted += right
        self.answers += 1
        self.tokens += len(answer)


def edits(suffix: str, most: int) -> Iterator[tuple[str, str]]:
    """Yield (old text, new text) of files with this suffix that commits changed, newest first."""
    log = _git("log", "--no-merges", "--diff-filter=M", "--name-only", "--format=@%H", "--", f"*{suffix}")
    commit, found = "", 0
    for line in log.splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line and found < most:
            found += 1
            yield _git("show", f"{commit}~:{line}"), _git("show", f"{commit}:{line}")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout.decode()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the model whose tokenizer is used")
    parser.add_argument("--pairs", type=int, default=200, help="texts of each kind (default: 200)")
    asked = parser.parse_args()
    with open_gguf(asked.model) as file:
        tokenizer = load_tokenizer(file)
        library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: asked.pairs]
        documents = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
        texts = {
            "edited code": edits(".py", asked.pairs),
            "edited prose": edits(".md", asked.pairs),
            "new code": (("", path.read_text(encoding="utf-8")) for path in library),
            "new prose": (("", path.read_text(encoding="utf-8")) for path in documents),
        }
        counted = {}
        for name, pairs in texts.items():
            counted[name] = counts = Counts()
            for old, new in pairs:
                prompt, answer = (
                    tokenizer.encode(text, add_special=False, parse_special=False).tolist() for text in (old, new)
                )
                if LEAST <= len(answer) <= LONGEST and len(prompt) <= LONGEST:
                    counts.add(prompt, answer)
    print(f"{'':14}{'answers':>9}{'tokens':>10}{'tokens/step':>13}{'accepted':>10}")
    for name, counts in counted.items():
        share = counts.accepted / max(1, counts.drafted)
        per_step = counts.tokens / max(1, counts.steps)
        print(f"{name:14}{counts.answers:9}{counts.tokens:10,}{per_step:13.2f}{share:10.0%}")
    print(f"\n{'match length':14}" + "".join(f"{name:>22}" for name in counted))
    for length in sorted({length for counts in counted.values() for length in counts.by_length}):
        cells = [counts.by_length.get(length, [0, 0]) for counts in counted.values()]
        print(f"{length:<14}" + "".join(f"{right / max(1, n):14.2f} {n:7}" for right, n in cells))


if __name__ == "__main__":
    main()
