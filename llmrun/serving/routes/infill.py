"""The route for filling in the middle."""

from __future__ import annotations

from llmrun.serving.protocol.infill import InfillAnswer, parse_infill
from llmrun.serving.protocol.wire import LLAMA_SERVER
from llmrun.serving.routes.generation import Call

INFILL = Call("infill-", parse_infill, InfillAnswer, LLAMA_SERVER)
