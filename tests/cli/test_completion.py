"""Tests of `llmrun completion`: the scripts, and how to install them. The tests in completing/ cover the candidates."""

from __future__ import annotations

import os

import pytest

from tests.support.cli.commands import llmrun, shell

pytestmark = pytest.mark.push

SHELLS = ("bash", "zsh", "fish")


def instructions(own: str) -> str:
    done = llmrun("completion", env={**os.environ, "SHELL": own})
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


@pytest.mark.parametrize("name", SHELLS)
def test_each_shell_has_a_script(name: str) -> None:
    done = llmrun("completion", name)
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"Completion of llmrun for {name}.".encode() in done.stdout


def test_without_a_shell_it_says_how_to_install_for_this_one() -> None:
    assert "\n  echo 'eval \"$(llmrun completion bash)\"' >> ~/.bashrc\n" in instructions("/bin/bash")
    assert "~/.zshrc" in instructions("/usr/local/bin/zsh")
    assert "mkdir -p ~/.config/fish/completions" in instructions("fish")
    assert "~/.bashrc" not in instructions("fish")


@pytest.mark.parametrize("own", ["", "/bin/tcsh"])
def test_for_an_unknown_shell_it_tells_about_all(own: str) -> None:
    assert all(name in instructions(own) for name in ("~/.bashrc", "~/.zshrc", "/fish/"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tcsh"], "completion: 'tcsh' is not one of bash, zsh, fish"),
        (["bash", "zsh"], "completion: expected one shell, got 2"),
    ],
)
def test_what_is_no_shell_is_refused(arguments: list[str], sentence: str) -> None:
    done = llmrun("completion", *arguments)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"error: {sentence}\n")


def test_the_line_to_install_works_in_a_new_shell() -> None:
    line = instructions("/bin/bash").split("echo '", 1)[1].split("' >>", 1)[0]
    done = shell(f'llmrun() {{ $LLMRUN "$@"; }}; {line}; complete -p llmrun')
    assert done.stdout == b"complete -o default -F _llmrun llmrun\n"
