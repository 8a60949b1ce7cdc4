"""GCS' batch requests: many deletes in one, each with an answer of its own.

    POST /batch/storage/v1     multipart/mixed; each part an HTTP request, named by its Content-ID
                               100 at most; the answers may come in any order

Pure: text to bytes and back.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from typing import Final
from urllib.parse import urlencode

__all__ = ["Inner", "batch_body", "batch_replies"]

_STATUS: Final = re.compile(rb"HTTP/[\d.]+ (\d{3})")
_NUMBER: Final = re.compile(r"\+(\d+)>?\s*$")


@dataclass(frozen=True, slots=True)
class Inner:
    """One answer in a batch. status 0: the server left it out."""

    status: int
    body: bytes = b""


def batch_body(paths: Sequence[str], query: Mapping[str, str]) -> tuple[str, bytes]:
    """The Content-Type and the body that ask for a DELETE of each path."""
    line = f"batch_{secrets.token_hex(8)}"
    tail = f"?{urlencode(query)}" if query else ""
    parts = "".join(
        f"--{line}\r\nContent-Type: application/http\r\nContent-Transfer-Encoding: binary\r\n"
        f"Content-ID: <ckptfs+{number}>\r\n\r\n"
        f"DELETE {path}{tail} HTTP/1.1\r\ncontent-length: 0\r\n\r\n\r\n"
        for number, path in enumerate(paths)
    )
    return f'multipart/mixed; boundary="{line}"', f"{parts}--{line}--\r\n".encode()


def batch_replies(content_type: str, body: bytes, asked: int) -> list[Inner]:
    """The answers, in the order of the question; by Content-ID, else by their order."""
    outer = BytesParser(policy=HTTP).parsebytes(
        f"Content-Type: {content_type}\r\n\r\n".encode() + body
    )
    found = [Inner(0)] * asked
    parts = list(outer.iter_parts()) if outer.is_multipart() else []
    for place, part in enumerate(parts):
        named = _NUMBER.search(str(part.get("Content-ID", "")))
        number = int(named[1]) if named else place
        payload = part.get_payload(decode=True)
        text = payload if isinstance(payload, bytes) else b""
        status = _STATUS.search(text)
        if status is not None and number < asked:
            found[number] = Inner(int(status[1]), text[text.find(b"{") :] if b"{" in text else b"")
    return found
