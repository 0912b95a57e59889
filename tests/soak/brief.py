"""Profiles whose cases are in tests/support and only need numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from llmrun.engine.templates.chat_template import RenderLimits, TemplateProcess
from tests.soak.driver import Broken, Case, Soak

ROOT = Path(__file__).resolve().parent.parent.parent
_TOKENS = 400  # the longest answer within a schema
_STORES = 5  # model stores per case, of which Hypothesis always makes the first one trivial
_STORE_STEPS = 40
_TEMPLATE_S = 0.1  # limit of a template's CPU time; users get more


def constraints(soak: Soak) -> Iterator[Case]:
    """Choose random tokens among the allowed ones. Every answer that ends by itself must be valid."""
    from tests.support.constraint.matchers import wrapped_tokenizer
    from tests.support.constraint.random_answers import random_answer, random_chooser
    from tests.support.constraint.soak import compiled_schemas, outcomes

    source, tokenizer = random.Random(), wrapped_tokenizer("llama-bpe")
    choose = random_chooser(tokenizer, source)
    found = outcomes(
        compiled_schemas(tokenizer), lambda matching: random_answer(matching, tokenizer, choose, _TOKENS), source
    )

    def case(number: int) -> str:
        source.seed(f"{soak.seed} {number}")
        outcome = next(found)
        if outcome.kind == "invalid":
            raise Broken(f"{outcome.schema}: {outcome.verdict}\n{outcome.answer.data.decode()[:1000]}")
        return outcome.kind

    yield case


def gguf(soak: Soak) -> Iterator[Case]:
    """Read mutated GGUF files. A file that crashes the reader is saved; commit it together with the fix."""
    from tests.support.gguf.gguf_mutations import base_files, mutant, outcome

    bases = base_files()

    def case(number: int) -> str:
        data = mutant(bases, soak.seed, number)
        try:
            return outcome(data)
        except Exception:
            path = ROOT / "tests" / "formats" / "gguf" / "corpus" / f"seed-{soak.seed}-case-{number}.gguf"
            path.write_bytes(data)
            soak.say(f"saved {path.relative_to(ROOT)}")
            raise

    yield case


def hub(soak: Soak) -> Iterator[Case]:
    """Run random operations on stores: pulls, pulls by other tools, removals, pruning, damage and kills.

    After a failure, Hypothesis prints the shortest sequence of steps that causes it.
    """
    from hypothesis import HealthCheck, Phase, seed, settings
    from hypothesis.stateful import run_state_machine_as_test

    from tests.support.hub.store_machine import StoreMachine

    chosen = settings(
        max_examples=_STORES,
        stateful_step_count=_STORE_STEPS,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )

    def case(number: int) -> str:
        run_state_machine_as_test(seed(soak.seed_of(number))(StoreMachine), settings=chosen)
        soak.counts["stores"] += _STORES
        return "rounds"

    yield case


def templates(soak: Soak) -> Iterator[Case]:
    """Render hostile chat templates, which are mutations of the templates in llama.cpp's source.

    Add a template that fails to tests/support/templates/hostile_templates.py together with the fix.
    """
    from tests.support.models.downloads import llama_cpp_source
    from tests.support.templates.template_drafts import hostile_draft
    from tests.support.templates.template_runs import ended

    paths = sorted((llama_cpp_source() / "vendor/llama.cpp/models/templates").glob("*.jinja"))
    real = [path.read_text(encoding="utf-8") for path in paths]
    process = TemplateProcess(RenderLimits(cpu_s=_TEMPLATE_S))

    def case(number: int) -> str:
        draft = hostile_draft(soak.seed, number, real)
        end = ended(process, draft)
        if not end.well:
            raise Broken(f"{end}\n{draft[:2000]}")
        return end.outcome

    yield case
    process.close()


def tool_calls(soak: Soak) -> Iterator[Case]:
    """Force random calls in the format of each of llama.cpp's templates, and parse them.

    In half of the cases, the tags of the format are control tokens, and in the others they are ordinary text.
    """
    from tests.support.tool_calls.forced import forced_call_problem
    from tests.support.tool_calls.formats import WITH_FORMATS, real_case

    def case(number: int) -> str:
        round_, index = divmod(number, len(WITH_FORMATS))
        found = real_case(WITH_FORMATS[index], control=round_ % 2 == 0)
        if wrong := forced_call_problem(found, f"{soak.seed} {number}"):
            raise Broken(f"{found.name}: {wrong}")
        return "valid"

    yield case
