"""Storage options of webhdfs://: fsspec's names and ours; others are errors.

    fsspec's  host port user password kerberos kerb_kwargs token proxy_to data_proxy use_https
              session_cert session_verify          fsspec.implementations.webhdfs.WebHDFS
    ours      replication block_size_bytes         of new files
              concurrency retry_s connect_timeout_s request_timeout_s      ckptfs.storage.options

The URI says host, port and user where the options do not; HADOOP_USER_NAME says the user where
neither does. Parsing does no I/O.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from ckptfs.errors import UriError
from ckptfs.storage.options import ObjectOptions, parse_options
from ckptfs.uri import Uri

__all__ = ["WEB", "web_options"]

WEB: Final = (
    "host",
    "port",
    "user",
    "password",
    "kerberos",
    "kerb_kwargs",
    "token",
    "proxy_to",
    "data_proxy",
    "use_https",
    "session_cert",
    "session_verify",
)
_OURS: Final = ("concurrency", "retry_s", "connect_timeout_s", "request_timeout_s")
_CREATING: Final = {"replication": "replication", "block_size_bytes": "blocksize"}
_WORDS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def web_options(
    uri: Uri, storage_options: Mapping[str, Any]
) -> tuple[ObjectOptions, dict[str, Any], dict[str, str]]:
    """Ours; what fsspec's class takes; and the parameters of every CREATE."""
    _known(uri, storage_options, (*WEB, *_CREATING, *_OURS))
    ours, rest = parse_options(uri, storage_options)
    creating = {
        _CREATING[name]: str(_number(uri, name, rest.pop(name)))
        for name in _CREATING
        if name in rest
    }
    options = {**_place(uri), **rest}
    if not options.get("host"):
        raise UriError("no NameNode is named", uri=uri, hint="write webhdfs://host:port/path")
    for name in ("kerberos", "use_https", "session_verify"):
        if isinstance(word := options.get(name), str) and word.lower() in _WORDS:
            options[name] = _WORDS[word.lower()]
    if "port" in options:
        options["port"] = _number(uri, "port", options["port"])
    named = any(options.get(name) for name in ("user", "token", "kerberos"))
    if not named and (user := os.environ.get("HADOOP_USER_NAME")):
        options["user"] = user
    return ours, options, creating


def _place(uri: Uri) -> dict[str, Any]:
    parts = urlsplit(f"//{uri.authority}")
    user, _, password = uri.userinfo.partition(":")
    try:
        found = {"host": parts.hostname, "port": parts.port, "user": user, "password": password}
    except ValueError as error:
        raise UriError(f"no port number in {uri.authority!r}", uri=uri) from error
    return {name: value for name, value in found.items() if value}


def _known(uri: Uri, options: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise UriError(
            f"{uri.protocol}:// has no storage option {unknown[0]!r}",
            uri=uri,
            hint=f"it has {', '.join(sorted(names))}",
        )


def _number(uri: Uri, name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError as error:
        raise UriError(f"storage option {name}={value!r}: it takes a number", uri=uri) from error
