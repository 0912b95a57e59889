"""What nobody may read in a report that people paste into issues: tokens and passwords, wherever they turn up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmrun.doctor.findings import Finding
from llmrun.hub.remote.ping import hub_token

_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|AUTHORIZATION")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_SHORTEST = 6  # what is shorter would blot out words
_INSTEAD = "[hidden]"


class Secrets:
    """The secrets of this process, as they are known when it is made."""

    def __init__(self) -> None:
        found = [value for name, value in os.environ.items() if _NAMES.search(name.upper())]
        found.append(hub_token() or "")
        # The longest first: one may be the beginning of another.
        self._values = sorted({value for value in found if len(value) >= _SHORTEST}, key=len, reverse=True)

    def hidden(self, text: str) -> str:
        """The text without them, and without the names and passwords of URLs."""
        for value in self._values:
            text = text.replace(value, _INSTEAD)
        return _USER.sub(f"{_INSTEAD}@", text)

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
