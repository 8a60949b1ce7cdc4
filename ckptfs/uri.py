"""Where something is: one immutable value, parsed once, never a ``pathlib.Path`` underneath.

    what a user writes                        protocol   str(uri)
    /data/run   ~/run   run   Path("run")     file       file:///data/run
    file:///data/run   file://localhost/data  file       file:///data/run
    s3://bucket/run    ckptfs+s3://bucket/run s3         s3://bucket/run
    s3://key:secret@bucket/run?token=abc      s3         s3://***@bucket/run?token=***
    memory://name/run                         memory     memory://name/run
    faults+file:///data/run                   faults+file  (a wrapper over file)

    protocol :// [userinfo@] authority path [?query]

Decided here, and the same on every rank because no disk is asked:

* ``//`` is collapsed and ``.`` and a trailing ``/`` are dropped, everywhere: ``f"{root}/{name}"``
  with a root that ends in a slash means what it looks like.
* ``..`` in a plain or ``file:`` path is resolved by its letters, as ``os.path.abspath`` does
  (not through symbolic links). In any other URI, and in a key, it is refused.
* Nothing is percent-decoded: ``%20`` is three characters, as in fsspec. In ``file:`` URIs ``?``
  and ``#`` are letters of a name; elsewhere ``?`` begins the query, which belongs to the client
  and is carried unchanged by ``parent`` and ``/``.
* Control characters and text that is not UTF-8 are refused: they would break every log line.
* Credentials (``user:password@``, a bare token before ``@``, query values that are not known to be
  harmless) are kept for the client (``full``, pickles) and masked in ``str``, ``repr`` and errors.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import parse_qsl

from ckptfs.errors import UriError

__all__ = ["MASK", "HasProtocol", "Uri", "check_key", "mask_credentials", "options_of"]

MASK = "***"
_PREFIX = "ckptfs+"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# The first component is the place itself (a bucket, a container, a host, a store's name).
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "wasb", "wasbs", "oss")
_HOSTS = ("http", "https", "sftp", "ssh", "ftp", "webhdfs", "smb")
_NEEDS_AUTHORITY = frozenset((*_BUCKETS, *_HOSTS, "memory"))
# The text before "@" without a password is a name here: a container, a login.
_NAMED_USER = frozenset(("abfs", "abfss", "wasb", "wasbs", "hdfs", "viewfs", *_HOSTS[2:]))
_HARMLESS_QUERY = frozenset(
    ("account_name", "anon", "endpoint", "endpoint_url", "project", "region", "shape", "versionid")
)


_BUCKET_SECRET = re.compile(
    rf"(\b(?:{'|'.join(_BUCKETS)})://)[^\s/?#@'\"]*:\d+/[^\s'\"]*@", re.IGNORECASE
)
# Whole headers: a signature has blanks and commas in it. Of a bytes literal, up to its end.
_HEADER_SECRET = re.compile(
    r"((?:authorization|proxy-authorization|x-amz-security-token|x-ms-encryption-key"
    r"|x-goog-encryption-key|x-amz-server-side-encryption-customer-key|set-cookie|cookie)"
    r"['\"]?\s*[:=]\s*)(?!AuthOptions)(?:b?'[^'\r\n]*'|b?\"[^\"\r\n]*\"|[^'\"\r\n]+)",
    re.IGNORECASE,
)
_NAMED_SECRET = re.compile(
    r"((?<![A-Za-z])(?:aws_|azure_|x-amz-)?(?:secret_?access_?key|session_?token|security-?_?token"
    r"|access_?token|refresh_?token|id_?token|client_?secret|private_?key|account_?key"
    r"|shared_?access_?(?:key|signature)|sas_?token|signature|credential|password|passwd|sig)"
    r"(?:['\"]?\s?[:=]\s?|>)b?['\"]?(?:Bearer |Basic )?|['\"]token['\"]\s?:\s?['\"])[^\s'\",;&)}\]<]+",
    re.IGNORECASE,
)
_BARE_SECRET = re.compile(r"((?<![:\w])//)[^\s/@'\"]+:[^\s@'\"]+@")


class HasProtocol(Protocol):
    """A ``upath.UPath``, recognised by its attributes: ckptfs does not need the library."""

    @property
    def protocol(self) -> str:
        """Its scheme."""

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """What its client was made with."""


@dataclass(frozen=True, slots=True, repr=False)
class Uri:
    """An absolute place. Make it with ``Uri.parse``; compare, hash and pickle it freely.

    protocol: lower case, such as "file", "s3", "memory"; authority: bucket, host or "";
    path: "" or "/..." without a trailing slash ("/" only for the root of a filesystem);
    query and userinfo: as written, for the client only.
    """

    protocol: str
    authority: str
    path: str
    query: str = ""
    userinfo: str = ""

    @staticmethod
    def parse(value: str | os.PathLike[Any] | HasProtocol | Uri, base: str | None = None) -> Uri:
        """Parse what a user wrote; the only place that does so.

        Relative paths are taken from ``base`` (a path or a URI), by default from the working
        directory. Raises UriError; nothing is touched.
        """
        if isinstance(value, Uri):
            return value
        text = _text_of(value)
        _refuse_unprintable(text)
        if not text.strip():
            raise UriError("an empty URI", hint="pass a path or a URI such as s3://bucket/run")
        stripped = text.removeprefix(_PREFIX)
        found = _SCHEME.match(stripped)
        if found is None:
            return _parse_path(text, base)
        return _parse_uri(found[1].lower(), stripped[found.end() :], _shown(text))

    @property
    def is_local(self) -> bool:
        """True for a plain mounted filesystem: ``local_path`` exists."""
        return self.protocol == "file"

    @property
    def local_path(self) -> str:
        """The absolute path of a ``file`` URI. UriError for any other."""
        if not self.is_local:
            raise UriError("this is not a path on a mounted filesystem", uri=self)
        return self.path

    @property
    def name(self) -> str:
        """The last component, "" at the root."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Uri:
        """One component less; the root is its own parent, so ``u.parent / u.name == u`` always."""
        head = self.path.rpartition("/")[0]
        return replace(self, path=head or ("" if self.authority else "/"))

    def __truediv__(self, key: str) -> Uri:
        check_key(key)
        if "?" in key and not _is_tree(self.protocol):
            raise UriError(f"a key of {self.protocol}:// cannot contain '?': {key!r}", uri=self)
        return replace(self, path=f"{self.path.rstrip('/')}/{key}") if key else self

    @property
    def full(self) -> str:
        """The text with its credentials, for the client library only: never log it."""
        return self._text(self.userinfo, self.query)

    @property
    def is_masked(self) -> bool:
        """True when this was parsed from a masked text: its credentials are gone."""
        return MASK in self.userinfo or MASK in re.split("[&=]", self.query)

    @property
    def options(self) -> dict[str, str]:
        """The query as storage options of the client. May hold credentials."""
        return dict(parse_qsl(self.query, keep_blank_values=True))

    def with_protocol(self, protocol: str) -> Uri:
        """The same place through another backend: ``faults+file`` -> ``file``."""
        return replace(self, protocol=protocol)

    def __str__(self) -> str:
        return self._text(_mask_user(self.protocol, self.userinfo), _mask_query(self.query))

    def __repr__(self) -> str:
        return f"Uri({str(self)!r})"

    def _text(self, userinfo: str, query: str) -> str:
        user = f"{userinfo}@" if userinfo else ""
        tail = f"?{query}" if query else ""
        return f"{self.protocol}://{user}{self.authority}{self.path}{tail}"


def check_key(key: str) -> None:
    """Refuse a key that is not a plain relative path: a safeguard against ``../`` in manifests.

    "" is the root itself. Raises UriError for "/x", "a//b", "a/", ".", "..", control characters.
    """
    if key and (key.startswith("/") or {"", ".", ".."} & set(key.split("/"))):
        raise UriError(f"not a relative key: {key!r}", hint="no '.', '..' or empty components")
    _refuse_unprintable(key)


def options_of(value: object) -> Mapping[str, Any]:
    """Return the storage options that a ``upath.UPath`` carries, {} for anything else."""
    found = getattr(value, "storage_options", None)
    return dict(found) if isinstance(found, Mapping) else {}


def mask_credentials(text: str) -> str:
    """Return any text with the credentials in it masked; rather too much than too little.

    These are the credentials of all URIs in the text, and those that have the names that HTTP
    headers, connection strings and signed requests give them.
    """
    text = _NAMED_SECRET.sub(rf"\1{MASK}", _HEADER_SECRET.sub(rf"\1{MASK}", text))
    # Buckets have no port: what looks like one is the beginning of a password.
    text = _BUCKET_SECRET.sub(rf"\1{MASK}@", text)
    # A password may contain an unencoded "/" or "@", so the mask reaches to the last "@" of the word.
    # host:8020/ is no password.
    text = _BARE_SECRET.sub(rf"\1{MASK}@", text)
    text = re.sub(r"(://)[^\s/?#:@'\"]*:(?!\d+/)[^\s'\"]*@", rf"\1{MASK}@", text)
    text = re.sub(
        r"\b([A-Za-z][A-Za-z0-9+.-]*)(://)([^\s/?#@'\"]+)@",
        lambda m: f"{m[1]}{m[2]}{_mask_user(m[1].lower(), m[3])}@",
        text,
    )
    return re.sub(r"(://[^\s?'\"]*\?)([^\s'\"]+)", lambda m: m[1] + _mask_query(m[2]), text)


def _shown(text: str) -> str:
    """Return the text for an error: one word, so that a secret with a blank is masked whole."""
    return mask_credentials(_BLANK.sub("_", text) if "://" in text else text)


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return os.fsdecode(value)
    protocol = getattr(value, "protocol", None)
    if isinstance(protocol, str) and hasattr(value, "storage_options"):  # upath.UPath
        return str(getattr(value, "path", value) if protocol in ("", "file", "local") else value)
    if isinstance(value, os.PathLike):
        # A cloud path's __fspath__ downloads into a cache: its text is the place, its fspath not.
        return str(value) if "://" in str(value) else os.fsdecode(os.fspath(value))
    raise UriError(
        f"a URI is a str or a path, not {type(value).__name__}",
        hint="pass a str, a pathlib.Path, a upath.UPath or a ckptfs.uri.Uri",
    )


def _refuse_unprintable(text: str) -> None:
    if _CONTROL.search(text):
        raise UriError(f"a control character in {_shown(text)!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UriError(f"not UTF-8: {_shown(text)!a}") from None


def _is_tree(protocol: str) -> bool:
    """Whether it is file or a wrapper of it: the path is a path, whatever characters it has."""
    return protocol.rpartition("+")[2] == "file"


def _parse_path(text: str, base: str | None) -> Uri:
    shown = _shown(text)
    if "://" in text:
        raise UriError(
            f"{shown!r} is neither a path nor a URI",
            hint="a URI begins with its scheme; chained fsspec URLs (a::b) are not supported",
        )
    if found := _COLLAPSED.match(text):
        raise UriError(
            f"{shown!r} has one slash after '{found[1]}:'",
            hint=f"write {found[1]}:// (a pathlib.Path collapses it: pass the URI as a str), "
            f"or ./{found[0]} for a directory of that name",
        )
    head = text.partition(":")[0].lower()
    if ":" in text and (head in _NEEDS_AUTHORITY or head == "file"):
        raise UriError(f"{shown!r} has no '//' after '{head}:'", hint=f"write {head}://...")
    if text.startswith(_PREFIX):
        raise UriError(f"{shown!r} has no scheme", hint="write ckptfs+file:///path or the path")
    if text.startswith("~"):
        text = os.path.expanduser(text)
        if text.startswith("~"):
            raise UriError(f"no home directory for {shown!r}")
    if not text.startswith("/"):
        if base is not None and "://" in base:
            root = Uri.parse(base)
            return replace(root, path=_joined(root, text, shown))
        try:
            text = posixpath.join(os.path.abspath(os.path.expanduser(base or "")), text)
        except FileNotFoundError:
            raise UriError(
                f"the working directory is gone, so the relative path {shown!r} has no meaning",
                hint="pass an absolute path",
            ) from None
    return Uri("file", "", _tidy_tree(text))


def _joined(root: Uri, text: str, shown: str) -> str:
    path = f"{root.path}/{text}"
    return _tidy_tree(path) if _is_tree(root.protocol) else _tidy_keys(path, shown)


def _parse_uri(protocol: str, body: str, shown: str) -> Uri:
    if protocol in ("file", "local") or _is_tree(protocol):
        protocol = "file" if protocol == "local" else protocol
        host, slash, path = body.partition("/")
        if host not in ("", "localhost") or not slash:
            raise UriError(
                f"{shown!r} names no absolute path",
                hint=f"write {protocol}:///absolute/path, with three slashes",
            )
        return Uri(protocol, "", _tidy_tree("/" + path))
    place, _, query = body.partition("?")
    before, slash, path = place.partition("/")
    userinfo, _, authority = before.rpartition("@")
    port = authority.rpartition(":")[2]
    has_port = port.isdigit() and protocol not in _BUCKETS
    if ":" in authority and not userinfo and not has_port and "@" in path:
        raise UriError(
            f"the password in {shown!r} holds a '/'",
            hint="percent-encode it, or pass credentials in storage_options",
        )
    if not authority and (protocol in _NEEDS_AUTHORITY or not slash):
        raise UriError(
            f"{shown!r} names no bucket, host or store", hint=f"write {protocol}://name/key"
        )
    path = _tidy_keys(path, shown) or ("" if authority else "/")
    return Uri(protocol, authority, path, query, userinfo)


def _tidy_tree(path: str) -> str:
    # POSIX lets exactly two leading slashes mean something else, and normpath keeps them.
    return "/" + posixpath.normpath(path).lstrip("/")


def _tidy_keys(path: str, shown: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UriError(f"'..' in {shown!r}", hint="an object store has no parent directories")
    return "".join(f"/{part}" for part in parts)


def _mask_user(protocol: str, userinfo: str) -> str:
    user, colon, _ = userinfo.partition(":")
    if protocol in _NAMED_USER and user:
        return f"{user}:{MASK}" if colon else user
    return MASK if userinfo else ""


def _mask_query(query: str) -> str:
    return "&".join(_mask_pair(pair) for pair in query.split("&")) if query else ""


def _mask_pair(pair: str) -> str:
    name, _, value = pair.partition("=")
    if name.lower() in _HARMLESS_QUERY and "@" not in value:
        return pair
    # No value: a bare token, perhaps one with padding that looks like "name=".
    return f"{name}={MASK}" if value.strip("=") else MASK
