"""Start a coding agent with a model on this machine.

The command starts a server that only this machine can reach, connects the agent to the server, and runs the agent in
this terminal. The server ends with the agent. Your files and your settings of the agent are not changed, and nothing is
installed.

Without --model and a default model, the command chooses a model that can call tools and fits this machine. Everything
after -- is passed to the agent.

Examples:
    llmrun launch --list
    llmrun launch claude
    llmrun launch codex -m qwen3:4b-instruct
    llmrun launch opencode -- --continue
    llmrun launch pi --print
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.amounts import format_bytes, format_seconds_roughly
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.arguments.usage import under
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from llmrun.cli.launching.agents import Agent
    from llmrun.cli.launching.models import AgentModel
    from llmrun.cli.launching.server import Wanted
    from llmrun.options.settings import Settings
    from llmrun.serving.leases import ServerPlace

LISTING = {
    "heading": "Run models",
    "place": 13,
    "unknown": "write the agent's own arguments after --, as in `llmrun launch pi -- --help`",
}
_HEADER = ("AGENT", "NAME", "INSTALLED", "INSTALL IT WITH")
_DROPPABLE = (("NAME",), ("INSTALL IT WITH",))  # columns to drop on narrow terminals
_WORTH_SAVING = 2000  # tokens; shorter prompts are processed quickly
_URL = "http://127.0.0.1:8080"  # the address of the server that --print shows
_QUESTION = (
    "Keep processed prompts of agents on disk, so that later sessions start sooner? They take up to {size}, and\n"
    "only your user account can read them. [Y/n] "
)


def _agents() -> list[tuple[str, str]]:
    from llmrun.cli.launching.agents import AGENTS

    return [(agent.name, agent.title) for agent in AGENTS.values()]


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[AGENT]", help="The agent; --list shows them.", autocompletion=_agents)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARG]...", help="Arguments for the agent, after --.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME",
            help="Model, preset or .gguf file.  [default: one that suits agents]",
            autocompletion=options.models,
        ),
    ] = None,
    list_agents: Annotated[
        bool, typer.Option("--list", help="List the agents, and how to install those that are missing.")
    ] = False,
    shows: Annotated[
        bool, typer.Option("--print", help="Print the commands, variables and files instead of using them.")
    ] = False,
    save_prefixes: Annotated[
        bool | None,
        typer.Option("--save-prefixes/--no-save-prefixes", help="Keep processed prompts on disk.  [default: ask once]"),
    ] = None,
    ctx_size: Annotated[
        int | None,
        under("Speed and memory")(
            "-c", "--ctx-size", metavar="N", help="Context size in tokens.  [default: what fits, up to 32768]"
        ),
    ] = None,
    kv_type: options.KVType = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the list as one JSON object.")] = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
) -> int:
    from llmrun.cli.launching.agents import AGENTS

    if list_agents:
        apply_settings({"quiet": quiet})
        _show_list([*AGENTS.values()], as_json=json_output)
        return 0
    if json_output:
        raise UsageError("--json: only for --list", hint="llmrun launch --list --json")
    agent = _agent_named(name, AGENTS)
    program = shutil.which(agent.program)
    if program is None and not shows:
        raise LlmrunError(
            f"{agent.title} is not installed: no program {agent.program!r}", hint=f"install it with {agent.install}"
        )
    given = {"model": model, "ctx_size": ctx_size, "kv_type": kv_type, "threads": threads, "backend": backend}
    given |= {"offline": offline or None, "quiet": quiet or None}
    settings = load_settings({key: value for key, value in given.items() if value is not None})
    out.quiet, out.color = settings.quiet, settings.color

    from llmrun.cli.launching.models import check_context, chosen_model, find_model, least_context
    from llmrun.cli.launching.server import Wanted

    check_context(settings.ctx_size, agent)
    settings = chosen_model(settings, agent, model)
    found = find_model(settings, download=not shows)
    least = least_context(settings, agent, found.path)
    saves = _saves_prefixes(settings, agent, save_prefixes, asks=not shows)
    wanted = Wanted(settings, found.lasting, least, saves)
    if shows:
        _print(agent, wanted, found, arguments or ())
        return 0
    assert program is not None
    return _launch(agent, [program, *(arguments or ())], wanted, found)


def _agent_named(name: str | None, agents: Mapping[str, Agent]) -> Agent:
    if name is None:
        raise UsageError("AGENT is missing", hint=f"one of {', '.join(agents)}; `llmrun launch --list` describes them")
    if name in agents:
        return agents[name]
    import difflib

    spelled = {
        word.lower(): agent.name for agent in agents.values() for word in (agent.name, agent.title, agent.program)
    }
    near = difflib.get_close_matches(name.lower(), spelled, n=1)
    hint = f"did you mean {spelled[near[0]]}?" if near else f"one of {', '.join(agents)}"
    raise UsageError(f"no such agent: {name!r}", hint=hint)


def _show_list(agents: Sequence[Agent], *, as_json: bool) -> None:
    from llmrun.cli.console.output import narrowed

    found = {agent.name: shutil.which(agent.program) for agent in agents}
    if as_json:
        out.json(
            {
                "agents": [
                    {
                        "name": agent.name,
                        "title": agent.title,
                        "program": agent.program,
                        "path": found[agent.name],
                        "install": agent.install,
                        "first_prompt_tokens": agent.first_prompt,
                        "least_context": agent.context,
                    }
                    for agent in agents
                ]
            }
        )
        return
    rows = [
        (agent.name, agent.title, "yes" if found[agent.name] else "no", "" if found[agent.name] else agent.install)
        for agent in agents
    ]
    lines = narrowed(_HEADER, rows, (), _DROPPABLE)
    out.lines(lines[:1], dim=True)
    out.lines(lines[1:])


def _saves_prefixes(settings: Settings, agent: Agent, flag: bool | None, *, asks: bool) -> bool:
    """Return whether the server saves prefixes: as the flag says, or as the user answered when asked once."""
    from llmrun.base.folders import private_folder, write_private
    from llmrun.cli.launching.server import launch_folder

    answer = launch_folder() / "save-prefixes"
    if flag is not None or settings.state_bytes == 0:
        return bool(flag)
    if answer.exists():
        return answer.read_bytes() == b"yes"
    if not (asks and is_terminal(sys.stdin) and is_terminal(sys.stderr)) or agent.first_prompt < _WORTH_SAVING:
        return False
    from llmrun.cli.chatting.tool_turns import ask

    said = ask(_QUESTION.format(size=format_bytes(settings.state_bytes)))
    if said is None:
        return False
    is_yes = said.lower() in ("", "y", "yes")
    private_folder(launch_folder())
    write_private(answer, b"yes" if is_yes else b"no")
    flag_for_one = "--no-save-prefixes" if is_yes else "--save-prefixes"
    out.note(f"llmrun will not ask again; {flag_for_one} overrides your answer once")
    return is_yes


def _launch(agent: Agent, command: Sequence[str], wanted: Wanted, found: AgentModel) -> int:
    """Run the agent with a server, and return the agent's exit code."""
    from llmrun.base.folders import write_private
    from llmrun.cli.launching.agents import Served, around_proxies
    from llmrun.cli.launching.models import unsuitable
    from llmrun.cli.launching.running import AgentRun
    from llmrun.cli.launching.server import connected, tidy

    tidy()
    place, context = _place(wanted, found)
    _tell(agent, wanted, found, place, context)
    with ExitStack() as held:
        server = held.enter_context(connected(wanted, place, context))
        facts = server.facts
        if agent.tools and not facts.tools:
            raise unsuitable(wanted.settings, agent, "its chat template does not support tools")
        out.clear_progress()
        served = Served(facts.url, server.key, facts.model, facts.context, server.folder)
        set_up = agent.set_up(served, os.environ)
        for file in set_up.files:
            file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(file.path, file.text.encode())
        run = held.enter_context(AgentRun())
        program, *arguments = command
        kept = {name: value for name, value in os.environ.items() if name not in set_up.removed}
        variables = {**around_proxies(os.environ), **set_up.variables}
        code = run.run([program, *set_up.arguments, *arguments], {**kept, **variables})
        if not place.is_alive():
            out.note(f"the server ended before the agent; its messages are in {place.log}")
        return code


def _place(wanted: Wanted, found: AgentModel) -> tuple[ServerPlace, int]:
    """Return the folder of a server that can be joined, or of a new one, and its context in tokens."""
    from llmrun.cli.launching.models import context_for

    for place in wanted.running():
        if (facts := place.facts()) is not None:
            return place, facts.context
    context = context_for(wanted.settings, wanted.context, found.path)
    return wanted.place(context), context


def _tell(agent: Agent, wanted: Wanted, found: AgentModel, place: ServerPlace, context: int) -> None:
    """Say what will run, and how long the first prompt will take."""
    wait = _first_wait(agent, wanted, found)
    prompt = f"first prompt about {agent.first_prompt:,} tokens"
    if wait is not None:
        prompt += f", {format_seconds_roughly(wait)} if none of it is cached"
    joins = ["on the server of another launch"] if place.facts() is not None else []
    out.fields([f"{agent.title} with {found.name}", *joins, f"context {context:,} tokens", prompt])


def _first_wait(agent: Agent, wanted: Wanted, found: AgentModel) -> float | None:
    """Return the predicted seconds for the agent's first prompt, or None if unknown."""
    if found.path is None:
        return None
    from llmrun.backends.prompt_times import predicted_prompt_s

    out.progress("measuring this machine (once)")
    try:
        return predicted_prompt_s(found.path, agent.first_prompt, threads=wanted.settings.threads, may_measure=True)
    finally:
        out.clear_progress()


def _print(agent: Agent, wanted: Wanted, found: AgentModel, arguments: Sequence[str]) -> None:
    """Print shell commands that do the same by hand."""
    place, context = _place(wanted, found)
    out.lines(_commands(agent, wanted, found, arguments, place, context))


def _commands(
    agent: Agent, wanted: Wanted, found: AgentModel, arguments: Sequence[str], place: ServerPlace, context: int
) -> Iterator[str]:
    from llmrun.cli.launching.agents import Served, around_proxies
    from llmrun.cli.launching.server import launch_folder

    served = Served(_URL, "unused", found.name, context, launch_folder() / "printed")
    set_up = agent.set_up(served, os.environ)
    yield "# The server, in another terminal. `llmrun launch` also creates an API key, uses a free port, and writes the"
    yield f"# server's messages to {place.log}"
    yield shell.words(["llmrun", *wanted.arguments(context)])
    for number, file in enumerate(set_up.files):
        if not number:
            yield "# Files for the agent"
        yield from shell.writing(file.path, file.text)
    yield f"# {agent.title}"
    yield from (shell.unset(name) for name in set_up.removed if name in os.environ)
    variables = {**around_proxies(os.environ), **set_up.variables}
    yield from (shell.setting(name, value) for name, value in variables.items())
    yield shell.words([agent.program, *set_up.arguments, *arguments])
