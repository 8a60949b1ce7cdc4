"""The storage options of GCS: gcsfs' vocabulary, checked here, the same for both libraries.

    storage_options  (+ FSSPEC_GS_* and FSSPEC_GCS_* of the environment)
          |  unknown or contradictory: UriError, before any request
          v
    GcsOptions    endpoint, token, project, who pays, time limits
                  settings   the settings of every object
                  others     options that only gcsfs knows

No value of an option is ever in an error's text. Over plain http credentials are sent only if the user gave
them: those that are found on the machine are never sent unencrypted.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any, Final

from fsspec.config import apply_config

from ckptfs.errors import UriError
from ckptfs.uri import Uri

__all__ = ["NAMED_TOKENS", "GcsOptions", "ObjectSettings", "parse_gcs_options"]

# The forms of ``token`` besides a key file, a dictionary, a Credentials object, or a token itself.
NAMED_TOKENS: Final = ("google_default", "cache", "cloud", "anon")

_ACCESS: Final = ("read_only", "read_write", "full_control")
_CLASSES: Final = (
    "STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE",
    "MULTI_REGIONAL", "REGIONAL", "DURABLE_REDUCED_AVAILABILITY",
)  # fmt: skip
# cloud.google.com/storage/docs/access-control/lists#predefined-acl
_ACLS: Final = (
    "authenticatedRead", "bucketOwnerFullControl", "bucketOwnerRead",
    "private", "projectPrivate", "publicRead",
)  # fmt: skip
# gcsfs' names, which are those of the JSON API, without content_encoding: bytes are stored
# unchanged.
_FIXED: Final = {
    "cache_control": "cacheControl",
    "content_disposition": "contentDisposition",
    "content_language": "contentLanguage",
    "custom_time": "customTime",
}
# gcsfs' own streams, caches and buckets, which ckptfs does not use: these options change no byte
# and no header.
_WITHOUT_EFFECT: Final = (
    "block_size", "consistency", "cache_timeout", "secure_serialize", "check_connection",
    "default_location", "version_aware", "use_listings_cache", "listings_expiry_time", "max_paths",
    "skip_instance_cache", "batch_size", "asynchronous", "loop",
)  # fmt: skip
_KMS_KEY: Final = re.compile(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+")
_META_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
_PRINTABLE: Final = re.compile(r"[\x20-\x7e]*")
_HOST: Final = re.compile(r"https?://[^/?#@\s]+/?")
_GOOGLE: Final = "https://storage.{domain}"
# By default Google's front ends keep a copy of a public object for an hour, and would show a run's
# old log, lease or manifest.
_NO_COPIES: Final = {"cache_control": "no-store"}


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """The settings of every object. The fields have the names of the options."""

    content_type: str = "application/octet-stream"
    metadata: Mapping[str, str] = field(default_factory=dict)
    fixed_key_metadata: Mapping[str, str] = field(default_factory=lambda: dict(_NO_COPIES))
    storage_class: str | None = None
    kms_key_name: str | None = None
    predefined_acl: str | None = None

    def resource(self) -> dict[str, Any]:
        """Return the settings as members of the JSON API's object resource."""
        found: dict[str, Any] = {"contentType": self.content_type}
        found |= {_FIXED[name]: value for name, value in self.fixed_key_metadata.items()}
        if self.metadata:
            found["metadata"] = dict(self.metadata)
        if self.storage_class:
            found["storageClass"] = self.storage_class
        return found

    def query(self) -> dict[str, str]:
        """Return the settings that the JSON API takes as parameters."""
        pairs = (("kmsKeyName", self.kms_key_name), ("predefinedAcl", self.predefined_acl))
        return {name: value for name, value in pairs if value}


@dataclass(frozen=True, slots=True)
class GcsOptions:
    """Checked options. They may hold credentials: never shown, pickled with the storage.

    endpoint: scheme://host[:port]. is_custom: It is not Google's own. request_s: The longest time
    that a whole request may take; None: only its silence is limited. others: Options that only
    gcsfs knows.
    """

    endpoint: str
    is_custom: bool
    token: Any = None
    project: str | None = None
    access: str | None = None
    requester_pays: bool | str = False
    session_kwargs: Mapping[str, Any] = field(default_factory=dict)
    request_s: float | None = None
    settings: ObjectSettings = ObjectSettings()
    others: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"GcsOptions({self.endpoint})"


class _Gs:
    protocol = ("gs", "gcs")


def parse_gcs_options(uri: Uri, options: Mapping[str, Any]) -> GcsOptions:
    """Check the options; those of the environment have lower precedence.

    UriError names what is wrong.
    """
    if uri.userinfo:
        raise UriError("gs:// takes no credentials in the URI", uri=uri, hint="pass token=")
    given = apply_config(_Gs, dict(options))
    given = {name: value for name, value in given.items() if value is not None}
    others = _others(uri, given)
    found = {
        name: parse(uri, name, given[name]) for name, parse in _PARSERS.items() if name in given
    }
    endpoint = found.pop("endpoint_url", None) or _from_environment(uri)
    limits = [found.pop(name) for name in ("timeout", "requests_timeout") if name in found]
    settings = ObjectSettings(
        **{item.name: found.pop(item.name) for item in fields(ObjectSettings) if item.name in found}
    )
    if found.get("token") is None and (endpoint or "").startswith("http:"):
        found["token"] = "anon"  # noqa: S105 - not a secret, but the absence of one
    domain = os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN", "googleapis.com")
    return GcsOptions(
        endpoint=endpoint or _GOOGLE.format(domain=domain),
        is_custom=endpoint is not None,
        request_s=min(limits, default=None),
        settings=settings,
        others=others,
        **found,
    )


def _others(uri: Uri, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that only gcsfs knows.

    UriError: gcsfs does not know one either, or is not installed.
    """
    unknown = sorted(set(given) - set(_PARSERS) - set(_WITHOUT_EFFECT))
    if not unknown:
        return {}
    names: Collection[str] = ()
    if find_spec("gcsfs") is not None:
        from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

        names = inspect.signature(GCSFileSystem.__init__).parameters
    for name in unknown:
        if name not in names or name in ("self", "kwargs"):
            raise UriError(
                f"gs:// knows no storage option {name!r}",
                uri=uri,
                hint=f"it knows {', '.join([*_PARSERS, *_WITHOUT_EFFECT])}",
            )
    return {name: given[name] for name in unknown}


def _from_environment(uri: Uri) -> str | None:
    found = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if found in ("", "default"):
        return None
    text = found if found.startswith(("http://", "https://")) else f"http://{found}"
    return _endpoint(uri, "STORAGE_EMULATOR_HOST", text)


# -- one option ------------------------------------------------------------------------


def _wrong(uri: Uri, name: str, takes: str) -> UriError:
    return UriError(f"storage option {name} takes {takes}", uri=uri)


def _text(uri: Uri, name: str, value: object) -> str:
    if not isinstance(value, str) or not value or not _PRINTABLE.fullmatch(value):
        raise _wrong(uri, name, "a string of printable characters")
    return value


def _endpoint(uri: Uri, name: str, value: object) -> str:
    if not isinstance(value, str) or not _HOST.fullmatch(value):
        raise _wrong(uri, name, "scheme://host or scheme://host:port, and no path")
    return value.rstrip("/")


def _token(uri: Uri, name: str, value: object) -> object:
    if value == "browser":
        raise _wrong(uri, name, "no 'browser': a job has no browser; use token='cache'")
    if value == "" or isinstance(value, bool | int | float | bytes):
        raise _wrong(
            uri, name, f"one of {', '.join(NAMED_TOKENS)}, a key file, its content, or a token"
        )
    return value


def _access(uri: Uri, name: str, value: object) -> str:
    if value not in _ACCESS:
        raise _wrong(uri, name, f"one of {', '.join(_ACCESS)}")
    return str(value)


def _pays(uri: Uri, name: str, value: object) -> bool | str:
    # A URI's query is text, and "false" must not mean a project.
    words = {"true": True, "1": True, "false": False, "0": False}
    found = words.get(str(value).lower(), value)
    if not isinstance(found, bool | str) or found == "":
        raise _wrong(uri, name, "true, false or the project that pays")
    return found


def _table(uri: Uri, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(uri, name, "a dictionary")
    return dict(value)


def _seconds(uri: Uri, name: str, value: object) -> float:
    try:
        found = float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        found = 0.0
    if not found > 0 or isinstance(value, bool):
        raise _wrong(uri, name, "seconds for a whole request")
    return found


def _metadata(uri: Uri, name: str, value: object) -> dict[str, str]:
    found = _table(uri, name, value)
    for key, text in found.items():
        if not _META_NAME.fullmatch(key):
            # They are also sent as headers, which have no upper case.
            raise _wrong(uri, name, "keys of lower-case letters, digits, '-', '_' and '.'")
        if not isinstance(text, str) or not _PRINTABLE.fullmatch(text):
            raise _wrong(uri, name, "values of printable ASCII characters")
    return found


def _fixed(uri: Uri, name: str, value: object) -> dict[str, str]:
    found = _table(uri, name, value)
    if "content_encoding" in found:
        raise _wrong(uri, name, "no content_encoding: bytes are stored as they are")
    if unknown := sorted(set(found) - set(_FIXED)):
        raise _wrong(uri, name, f"{', '.join(_FIXED)}, and no {unknown[0]!r}")
    attributes = {key: _text(uri, f"{name}[{key!r}]", text) for key, text in found.items()}
    return _NO_COPIES | attributes


def _kms_key(uri: Uri, name: str, value: object) -> str:
    if not isinstance(value, str) or not _KMS_KEY.fullmatch(value):
        raise _wrong(uri, name, "projects/P/locations/L/keyRings/R/cryptoKeys/K")
    return value


def _class(uri: Uri, name: str, value: object) -> str:
    if value not in _CLASSES:
        raise _wrong(uri, name, f"one of {', '.join(_CLASSES)}")
    return str(value)


def _acl(uri: Uri, name: str, value: object) -> str:
    plain = str(value).replace("-", "").lower()
    found = next((acl for acl in _ACLS if acl.lower() == plain), None)
    if found is None:
        raise _wrong(uri, name, f"one of {', '.join(_ACLS)}")
    return found


_PARSERS: Final[Mapping[str, Callable[[Uri, str, object], Any]]] = {
    "token": _token,
    "project": _text,
    "access": _access,
    "endpoint_url": _endpoint,
    "requester_pays": _pays,
    "session_kwargs": _table,
    "timeout": _seconds,
    "requests_timeout": _seconds,
    "content_type": _text,
    "metadata": _metadata,
    "fixed_key_metadata": _fixed,
    "storage_class": _class,
    "kms_key_name": _kms_key,
    "predefined_acl": _acl,
}
