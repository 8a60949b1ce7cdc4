"""``Server``: all that a test has to know about a running server; a value, picklable."""

from __future__ import annotations

import copy
import json
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BUCKET = "ckptfs-lab"


@dataclass(frozen=True)
class Server:
    """One running server. It stays up as long as the ``with`` block that started it.

    protocol: of its URIs ("s3", "gs", "az", "webhdfs").
    options: storage_options in the vocabulary of fsspec's library for that protocol.
    environment: variables that tell a process the same without options.
    ca_file: the certificate that signed its own, where it speaks https.
    """

    name: str
    protocol: str
    endpoint: str
    bucket: str
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    run_dir: str = ""
    pids: tuple[int, ...] = ()
    ca_file: str | None = None

    def uri(self, path: str = "") -> str:
        """The URI of a path in its bucket."""
        root = f"{self.protocol}://{self.bucket}"
        return f"{root}/{path}" if path else root

    def fresh(self, label: str = "t") -> str:
        """The URI of an unused prefix."""
        return self.uri(f"{label}-{uuid.uuid4().hex[:12]}")

    def storage_options(self, **more: Any) -> dict[str, Any]:
        """Options of its own for one caller, with ``more`` on top; nested dicts are merged."""
        return merged(self.options, more)

    def describe(self) -> str:
        """What a person pastes into a shell and into Python."""
        exports = [f"export {name}={shlex.quote(at)}" for name, at in self.environment.items()]
        options = json.dumps(self.storage_options(), indent=4)
        lines = [f"# {self.name} at {self.endpoint}", *exports, f"uri = {self.uri()!r}"]
        return "\n".join([*lines, f"storage_options = {options}", "# Ctrl-C stops it"])


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``more`` on top; dicts in both become one dict; nothing is shared with either."""
    result = dict(copy.deepcopy(dict(base)))
    for name, value in more.items():
        ours = result.get(name)
        if isinstance(ours, dict) and isinstance(value, Mapping):
            result[name] = merged(ours, value)
        else:
            result[name] = copy.deepcopy(value)
    return result
