"""The models of a server, by the names that clients use. For now, a server has one model."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.engine.facts import ModelFacts
from llmrun.engine_process.served_model import ServedModel, State
from llmrun.errors import ModelNotFound, Unavailable

_RETRY_S = 5.0  # when to ask again for a model that is loading


@dataclass(frozen=True, slots=True)
class Models:
    """The only model of a server and the name that clients use for it.

    created  when the server was started, in seconds since 1970, for `created` in the list of models
    """

    name: str
    only: ServedModel
    created: int

    def find(self, name: object) -> ServedModel:
        """Return the model that a request names in its field `model`. A missing or empty name means the only model.

        Raises ModelNotFound.
        """
        if name in (None, "", self.name) or not isinstance(name, str):  # parsing the request refuses other types
            return self.only
        raise ModelNotFound(f"no such model: {name[:100]!r}", hint=f"this server has {self.name!r}")


def facts_of(model: ServedModel) -> ModelFacts:
    """Return the facts about a model. Raises Unavailable if it is not open or the server is shutting down."""
    facts = model.facts
    if facts is None or model.state is State.DRAINING:
        raise Unavailable(f"the model is not available: {model.state}", state=model.state.value, retry_after=_RETRY_S)
    return facts
