"""Redacts tokens and passwords, because people paste the doctor's report into public issues."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmrun.hub.remote.ping import hub_token
from llmrun.jobs.doctor.findings import Finding

_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|AUTHORIZATION")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_SHORTEST = 6  # characters; redacting shorter values would also hide ordinary words
_REDACTED = "[hidden]"


class Secrets:
    """The secrets found in the environment when the object was created."""

    def __init__(self) -> None:
        found = [value for name, value in os.environ.items() if _NAMES.search(name.upper())]
        found.append(hub_token() or "")
        # Longer secrets are replaced first, because a short one may be a prefix of a longer one.
        self._values = sorted({value for value in found if len(value) >= _SHORTEST}, key=len, reverse=True)

    def hidden(self, text: str) -> str:
        """Redact all secrets in a text, including user names and passwords in URLs."""
        for value in self._values:
            text = text.replace(value, _REDACTED)
        return _USER.sub(f"{_REDACTED}@", text)

    def hidden_in(self, finding: Finding) -> Finding:
        return replace(
            finding,
            words=self.hidden(finding.words),
            advice=self.hidden(finding.advice),
            command=self.hidden(finding.command),
            facts=self._of(finding.facts),
        )

    def _of(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hidden(value)
        if isinstance(value, Mapping):
            return {key: self._of(one) for key, one in value.items()}
        return [self._of(one) for one in value] if isinstance(value, list | tuple) else value
