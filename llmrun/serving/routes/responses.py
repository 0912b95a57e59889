"""The routes of OpenAI's Responses API. This server stores no responses."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmrun.serving.protocol.openai_responses.answers import PREFIX, ResponseAnswer
from llmrun.serving.protocol.openai_responses.requests import parse_response
from llmrun.serving.protocol.openai_responses.wire import RESPONSES
from llmrun.serving.refusals import Refused
from llmrun.serving.routes.generation import Call

RESPONSE: Final = Call(PREFIX, parse_response, ResponseAnswer, RESPONSES)
_LONGEST_ID: Final = 100  # characters in a message


async def no_stored_response(request: HttpRequest) -> Response:
    """Refuse what clients do with stored responses."""
    name = request.path_params["id"][:_LONGEST_ID]
    raise Refused(404, f"no such response: {name!r}; this server stores no responses", code="not_found")
