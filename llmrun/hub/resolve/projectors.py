"""Finds the vision projector of a model on the Hub, and decides whether a run opens the model with its projector."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llmrun.backends.registry import is_stand_in
from llmrun.base.errors import LlmrunError, ModelNotFound, UsageError
from llmrun.hub.local.projectors import check_pair, projector_for, snapshot_of
from llmrun.hub.local.stored_models import repository_name
from llmrun.hub.names import Artifact, HubSource, RemoteFile
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.projector_names import choices
from llmrun.hub.resolve.model_file import is_offline, resolve
from llmrun.options.settings import MMPROJ_OFF, Settings

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.hub.remote.repository import Listing
    from llmrun.hub.resolve.model_file import Pull

_ON_HUB = re.compile(r"(?:hf|huggingface|https?):", re.IGNORECASE)  # these values of --mmproj are not paths


def projector_options(
    model: Path, settings: Settings, *, name: str, wanted: bool, needed: bool = False, reporter: Reporter
) -> tuple[str, int | None, int | None]:
    """Return the fields `mmproj`, `image_min_tokens` and `image_max_tokens` of OpenOptions for opening a local model.

    A projector that the settings name is always used. Otherwise, the projector next to the model is used if `wanted`.

    model   the model's first file
    name    the model's name, for messages
    wanted  True if images may come, as in `serve`. If this machine cannot use the projector, the model is
            opened for text only, with a note
    needed  True if there is an image, as in `generate --image` and `batch`. A projector in the model's repository is
            downloaded. Raises ModelNotFound if there is none, and the errors of a download

    Raises UsageError if several projectors match, and ModelNotFound if the named projector does not exist.
    """
    path = _chosen(model, settings, name, wanted, needed, reporter)
    return "" if path is None else str(path.absolute()), settings.image_min_tokens, settings.image_max_tokens


def _chosen(model: Path, settings: Settings, name: str, wanted: bool, needed: bool, reporter: Reporter) -> Path | None:
    asked = settings.mmproj
    if asked == MMPROJ_OFF:
        if needed:
            raise UsageError(
                f"{name}: images need the projector", hint='leave out --no-mmproj, or the setting mmproj = "off"'
            )
        return None
    if asked is not None and is_stand_in(settings.backend):
        return Path(asked)
    if asked is not None and _ON_HUB.match(asked):
        return resolve(asked, offline=settings.offline, reporter=reporter).path
    if asked is not None:
        return projector_for(model, asked)
    if is_stand_in(settings.backend) or not (wanted or needed):
        return None
    if needed:
        return projector_for(model) or _fetched(model, name, settings.offline, reporter)
    return _usable(model, name, reporter)


def _usable(model: Path, name: str, reporter: Reporter) -> Path | None:
    """Return the projector next to the model if this machine can use it. Otherwise, a note says why not."""
    try:
        found = projector_for(model)
        if found is not None:
            check_pair(found, model)
    except LlmrunError as error:
        reporter.note(f"{name}: opened for text only: {error}" + (f" ({error.hint})" if error.hint else ""))
        return None
    return found


def _fetched(model: Path, name: str, offline: bool, reporter: Reporter) -> Path:
    """Download the projector from the model's repository. Raises ModelNotFound if there is none."""
    missing = f"{name}: no projector (mmproj) found, so this model cannot read images"
    place = _place_of(model, name)
    if place is None or is_offline(offline):
        on_hub = "" if place is None else f"`llmrun pull {name}` downloads the projector if there is one; "
        raise ModelNotFound(missing, hint=f"{on_hub}--mmproj FILE names the file of a projector")
    found = projector_on_hub(place, reporter)
    if found is None:
        raise ModelNotFound(missing, hint="use a model that reads images, or name a projector with --mmproj FILE")
    from llmrun.hub.transfer.download import download

    return download(found, reporter)


def with_projector(pull: Pull, reporter: Reporter, *, offline: bool) -> Pull:
    """Add the model's projector to a pull, if the model's repository has one that is not on this machine.

    The pull continues without a projector, and with a note, if the repository cannot be listed.
    """
    place = pull.pinned
    try:
        if pull.here is not None:
            known = _place_of(pull.here, pull.name)
            if known is None:  # the model does not come from the Hub, or another program downloaded it
                return pull
            if place is None:
                if is_offline(offline) or not _may_see_images(pull.here) or projector_for(pull.here) is not None:
                    return pull
                place = known
        return pull if place is None else replace(pull, projector=projector_on_hub(place, reporter))
    except LlmrunError as error:
        reporter.note(f"{pull.name}: no projector was downloaded: {error}")
        return pull


def projector_on_hub(model: Artifact, reporter: Reporter, listed: Listing | None = None) -> Artifact | None:
    """Return the projector in a model's repository at the model's commit, or None. Raises the errors of `listing`.

    If the repository has several projectors that match the model, returns None with a note.

    listed  the repository at this commit, if it is known
    """
    if not isinstance(model.source, HubSource):
        return None
    from llmrun.hub.remote.huggingface import listing
    from llmrun.hub.transfer.download import bytes_here

    found = listed or listing(replace(model.source, revision=model.commit))
    projectors = {file.path: file for file in found.projectors}
    names = [file.path for offered in found.models for file in offered.files]
    matching = choices(model.files[0].path, [*names, *projectors])
    if len(matching) > 1:
        example = f"hf:{model.source.repository}/{matching[0].files[0]}"
        reporter.note(f"{model.name}: {len(matching)} projectors match; choose one later with --mmproj {example}")
    if len(matching) != 1:
        return None
    offers = [model.for_projector(projectors[file]) for file in matching[0].files]
    return next((offer for offer in offers if bytes_here(offer) == offer.size), offers[0])


def _place_of(model: Path, name: str) -> Artifact | None:
    """Return the repository, commit and name of a model's first file in the Hugging Face cache, or None."""
    snapshot = snapshot_of(model)
    repository = repository_name(snapshot.parent.parent.name) if snapshot else ""
    if snapshot is None or not repository:
        return None
    file = RemoteFile(model.absolute().relative_to(snapshot).as_posix(), 0, None)
    return Artifact(name, HubSource(repository, file.path, revision=snapshot.name), (file,), snapshot.name)


def may_see_images(model: GGUFFile) -> bool:
    """Return whether the chat template of a model mentions images, so that asking the Hub for a projector is useful."""
    return "image" in model.string("tokenizer.chat_template", "").lower()


def _may_see_images(model: Path) -> bool:
    from llmrun.formats.gguf.reader import open_gguf

    try:
        with open_gguf(model) as file:
            return may_see_images(file)
    except LlmrunError:  # commands that open the model report the error
        return False
