"""The models of a server, by the names that clients use. For now, a server has one model."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.errors import ModelNotFound, Unavailable
from llmrun.serving.model import ModelFacts, ServedModel, State


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
        raise ModelNotFound(f"no such model: {name[:100]!r}; this server has {self.name!r}", hint="see GET /v1/models")


_STATES = {
    State.LOADING: ("the model is being loaded", 5.0),
    State.RESTARTING: ("the model is being restarted", 5.0),
    State.DRAINING: ("the server is shutting down", 10.0),
    State.FAILED: ("the model could not be loaded", 60.0),
}


def facts_of(model: ServedModel) -> ModelFacts:
    """Return the facts about a model. Raises Unavailable if it is not open yet."""
    facts = model.facts
    if facts is None:
        raise unavailable(model.state)
    return facts


def unavailable(state: State) -> Unavailable:
    """Return the error for a request that a model in this state cannot take."""
    words, retry_after = _STATES.get(state, ("the model is not available", 5.0))
    return Unavailable(f"{words}; try again later", state=state.value, retry_after=retry_after)
