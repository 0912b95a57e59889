"""A Hypothesis state machine for the model store, checked against a simple model of its expected contents."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download, scan_cache_dir
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmrun.base.errors import ModelNotFound
from llmrun.hub.local import stored_models
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.resolve.model_file import LocalPath, understand
from llmrun.hub.transfer.download import download
from llmrun.hub.upkeep.inventory import Model, facts_of, models, select
from llmrun.hub.upkeep.removal import Removal, prunings, removal_of, remove
from llmrun.hub.upkeep.verification import verify
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.hub.fetching import Folders, artifact_of
from tests.support.hub.hub_client import at_hub
from tests.support.hub.model_stores import gguf, sha256

REPOSITORIES = ("org/one", "org/two")
FILES = ("m-Q4_0.gguf", "m-Q8_0.gguf")
SHORT = 10  # digits of a commit in a model's name

Repositories = st.sampled_from(REPOSITORIES)
Files = st.sampled_from(FILES)
Salts = st.integers(0, 3)  # few values, so that the same bytes recur


class StoreMachine(RuleBasedStateMachine):
    """The store and a simple model of it.

    `snapshots` maps each file of a snapshot to its sha256, `main` maps each repository to the local commit of its
    branch, and `damaged` lists corrupted blobs. Everything else follows from these.
    """

    kill_delay = 0.6  # seconds before a child process is killed, at most

    def __init__(self) -> None:
        super().__init__()
        self.closing = ExitStack()
        self.root = Path(tempfile.mkdtemp())
        self.closing.callback(shutil.rmtree, self.root)
        self.outside = self.root / "outside"
        self.outside.mkdir()
        (self.outside / "mine.gguf").write_bytes(gguf(salt=99))
        (self.root / "config.toml").touch()
        self.folders = Folders(self.root)
        self.hub: FakeHub = self.closing.enter_context(fake_hub())
        patch = self.closing.enter_context(pytest.MonkeyPatch.context())
        self.folders.use(patch, self.hub)
        at_hub(patch, self.hub.url)
        self.snapshots: dict[tuple[str, str, str], str] = {}  # (repository, commit, file) -> sha256
        self.main: dict[str, str] = {}
        self.damaged: set[tuple[str, str]] = set()  # (repository, sha256)
        for repository in REPOSITORIES:
            self.hub.add(repository, {file: gguf(salt=0) for file in FILES})

    def teardown(self) -> None:
        self.closing.close()

    # --- operations ---------------------------------------------------------------------------------------------------

    @rule(repository=Repositories, salts=st.tuples(Salts, Salts))
    def publish(self, repository: str, salts: tuple[int, int]) -> None:
        self.hub.add(repository, {file: gguf(salt=salt) for file, salt in zip(FILES, salts, strict=True)})

    @rule(repository=Repositories, file=Files)
    def pull(self, repository: str, file: str) -> None:
        made = self.hub.repositories[repository]
        path = download(artifact_of(made, file), Silent())
        assert sha256(path.read_bytes()) == made.file(file).sha256
        self._linked(repository, file)
        self.damaged.discard((repository, made.file(file).sha256))

    @rule(repository=Repositories, file=Files)
    def pull_with_another_tool(self, repository: str, file: str) -> None:
        hf_hub_download(repository, file, cache_dir=self.folders.cache)
        self._linked(repository, file)

    @rule(repository=Repositories, file=Files, moment=st.floats(0.05, 1))
    def kill_a_pull(self, repository: str, file: str, moment: float) -> None:
        self._killed(moment, "pull", f"hf:{repository}/{file}")
        self.pull(repository, file)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        repository, digest = data.draw(
            st.sampled_from(sorted({(key[0], digest) for key, digest in self.snapshots.items()}))
        )
        with self._blob(repository, digest).open("ab") as file:
            file.write(b"!")
        self.damaged.add((repository, digest))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        model = self._any(data)
        digest = self._digest(model)
        assert remove(removal_of(model)) == self._removed(model, digest)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), moment=st.floats(0.05, 1))
    def kill_a_removal(self, data: st.DataObject, moment: float) -> None:
        model = self._any(data)
        digest = self._digest(model)
        self._killed(moment, "rm", model.name)
        with contextlib.suppress(OSError):  # an empty folder may remain, and the Hub's tool would warn of it
            self._blob(model.repository, digest).parent.parent.rmdir()
        self.the_hubs_own_tool_finds_nothing_wrong()
        file = getattr(model.source, "file", "")
        for each in models():  # some of its links may be gone, which changes its name
            if each.repository == model.repository and self._digest(each) == digest and each.path.name == file:
                remove(removal_of(each))
        self._removed(model, digest)
        if not any((key[0], held) == (model.repository, digest) for key, held in self.snapshots.items()):
            # Nothing links to these bytes any more; prune would remove them after a week.
            self._blob(model.repository, digest).unlink(missing_ok=True)

    @rule(dry=st.booleans())
    def prune(self, dry: bool) -> None:
        for planned in list(prunings()):
            assert isinstance(planned, Removal)
            if not dry:
                remove(planned)
        if not dry:
            for repository, commit, file in list(self.snapshots):
                current = self.main.get(repository)
                if commit != current and (repository, current, file) in self.snapshots:
                    del self.snapshots[repository, commit, file]
            self._forget_what_is_gone()

    @rule(name=st.sampled_from(["hf:org/none", "hf:../..:Q4_0", "../outside/mine.gguf", "hf:org/one:Q2_K", "\x1b[31m"]))
    def remove_what_is_not_here(self, name: str) -> None:
        done = subprocess.run([*LLMRUN, "rm", name], cwd=ROOT, env=dict(os.environ), capture_output=True, check=False)
        assert done.returncode in (2, 4)
        assert b"\x1b" not in done.stderr

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_list_is_the_models(self) -> None:
        found = {model.name: sorted(model.commits) for model in models()}
        assert found == self._expected_names()

    @invariant()
    def the_hubs_own_tool_finds_nothing_wrong(self) -> None:
        if self.folders.cache.is_dir():
            warnings = [str(warning) for warning in scan_cache_dir(self.folders.cache).warnings]
            assert not warnings, warnings

    @invariant()
    def the_bytes_are_those_that_something_links_to(self) -> None:
        here = {(path.parent.parent.name, path.name) for path in self.folders.cache.glob("models--*/blobs/*")}
        wanted = {("models--" + key[0].replace("/", "--"), digest) for key, digest in self.snapshots.items()}
        assert here == wanted

    @invariant()
    def nothing_outside_was_touched(self) -> None:
        assert (self.outside / "mine.gguf").read_bytes() == gguf(salt=99)
        assert sorted(path.name for path in self.root.iterdir() if path.name not in ("data", "hf")) == [
            "config.toml",
            "outside",
        ]

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def show_and_verify(self, data: st.DataObject) -> None:
        model = self._any(data)
        facts, problem = facts_of(model)
        assert (facts.architecture, problem) == ("llama", "")
        is_damaged = (model.repository, self._digest(model)) in self.damaged
        assert bool(verify(model, (), Silent()).problems) == is_damaged
        meant = understand(model.name)
        assert not isinstance(meant, LocalPath)
        assert stored_models.find(meant, Silent()) == (None if is_damaged else model.path)

    @rule(name=st.sampled_from(["hf:org/one:Q4_0", "hf:org/two:Q8_0", "hf:org/one"]))
    def select_by_a_name(self, name: str) -> None:
        repository, _, quant = name.removeprefix("hf:").partition(":")
        expected = any(
            (repository, self.main.get(repository), file) in self.snapshots for file in FILES if quant in file
        )
        try:
            select(name, models())
        except ModelNotFound:
            assert not expected
        else:
            assert expected

    # --- simple model of the store ------------------------------------------------------------------------------------

    def _linked(self, repository: str, file: str) -> None:
        made = self.hub.repositories[repository]
        self.main[repository] = made.commit
        self.snapshots[repository, made.commit, file] = made.file(file).sha256

    def _expected_names(self) -> dict[str, list[str]]:
        commits: dict[tuple[str, str, str], list[str]] = {}
        for (repository, commit, file), digest in self.snapshots.items():
            commits.setdefault((repository, file, digest), []).append(commit)
        names = {}
        for (repository, file, _), of in commits.items():
            name = f"hf:{repository}:{file[2:6]}"
            is_current = self.main.get(repository) in of
            names[name if is_current else f"{name}@{min(of)[:SHORT]}"] = sorted(of)
        return names

    def _any(self, data: st.DataObject) -> Model:
        found = models()
        return found[data.draw(st.integers(0, len(found) - 1))]

    def _digest(self, model: Model) -> str:
        return os.path.basename(os.path.realpath(model.path))  # noqa: PTH119

    def _removed(self, model: Model, digest: str) -> int:
        """Forget the model's files and return the number of bytes that must have been freed."""
        keys = [key for key, held in self.snapshots.items() if key[0] == model.repository and held == digest]
        for key in keys:
            if key[1] in model.commits and key[2] == getattr(model.source, "file", ""):
                del self.snapshots[key]
        freed = not any(key in self.snapshots for key in keys)
        self._forget_what_is_gone()
        return model.size if freed else 0

    def _forget_what_is_gone(self) -> None:
        """Drop references whose snapshot has no files left, and damage records whose blob is gone."""
        commits = {(key[0], key[1]) for key in self.snapshots}
        self.main = {name: commit for name, commit in self.main.items() if (name, commit) in commits}
        self.damaged &= {(key[0], digest) for key, digest in self.snapshots.items()}

    def _blob(self, repository: str, digest: str) -> Path:
        return self.folders.cache / ("models--" + repository.replace("/", "--")) / "blobs" / digest

    def _killed(self, moment: float, *arguments: str) -> None:
        if sys.platform == "win32":
            pytest.skip("needs POSIX signals")
        with subprocess.Popen(
            [*LLMRUN, *arguments],
            cwd=ROOT,
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as child:
            try:
                child.wait(moment * self.kill_delay)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
