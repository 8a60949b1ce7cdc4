"""Google's credentials for clients that do not bring gcsfs' own: from what ``token`` may be, a token.

    "google_default", None            what google-auth finds: GOOGLE_APPLICATION_CREDENTIALS, gcloud's
                                      file, workload identity, the machine's service account
    "cloud"                           the machine's service account
    a path, a dictionary              a key file of a service account or of gcloud, or its content
    a Credentials object              itself
    any other text                    a token that is used as it is

``Login()`` is obstore's credential provider: it is called when a token is needed, and again a while
before that one ends. Picklable as long as the credentials are; one per process and client.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ckptfs.storage.clients.gcs_options import NAMED_TOKENS

__all__ = ["Login", "is_raw", "refresh", "usable"]

_AHEAD: Final = timedelta(minutes=5)  # as google-auth and gcsfs have it
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage."
_FOUND: Final = (None, "google_default")


def is_raw(token: object) -> bool:
    """Whether it is a token itself: no name, no path of a file."""
    return (
        isinstance(token, str)
        and token not in NAMED_TOKENS
        and not os.path.exists(token)
        and not token.endswith(".json")
        and not token.startswith(("/", "~", "./"))
    )


class Login:
    """Tokens for one set of credentials; threads may share it."""

    def __init__(self, token: Any, access: str | None) -> None:
        self._given = token
        self._access = access or "full_control"
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._handed: str | None = None
        self._fresh: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_given": self._given, "_access": self._access}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self) -> dict[str, Any]:
        """obstore's ``GCSCredential``: the token, and when to ask for the next one."""
        with self._lock:
            held = self._held()
            expiry = _aware(held.expiry)
            if held.token is None or (expiry and expiry - datetime.now(UTC) < _AHEAD):
                if held.token is None or not is_raw(self._given):
                    refresh(held)
                expiry = _aware(held.expiry)
            self._handed = str(held.token)
            return {"token": self._handed, "expires_at": expiry - _AHEAD if expiry else None}

    def accepted(self) -> None:
        """The last token was good: when it is refused one day, another is worth asking for."""
        self._fresh = None

    def renew(self) -> bool:
        """Whether another token may help after the last one was refused: asks for one, once."""
        with self._lock:
            if is_raw(self._given) or self._handed is None or self._handed == self._fresh:
                return False
            refused, held = self._handed, self._held()
            from google.auth.exceptions import GoogleAuthError

            try:
                refresh(held)
            except GoogleAuthError:
                return False
            self._fresh = str(held.token)
            return self._fresh != refused

    def _held(self) -> Any:
        if self._credentials is None:
            self._credentials = _credentials(self._given, f"{_SCOPE}{self._access}")
        return self._credentials


def _credentials(given: Any, scope: str) -> Any:
    import google.auth
    from google.oauth2 import credentials, service_account

    user: Any = credentials.Credentials
    machine: Any = service_account.Credentials
    if is_raw(given):
        return user(given)
    if given in _FOUND:
        found, _ = google.auth.default(scopes=[scope])
        return found
    if given == "cloud":
        from google.auth import compute_engine

        there: Any = compute_engine.Credentials
        return there()
    if isinstance(given, str):
        with open(os.path.expanduser(given), encoding="utf-8") as file:
            given = json.load(file)
    if not isinstance(given, Mapping):
        return given
    if given.get("type") == "service_account":
        return machine.from_service_account_info(dict(given), scopes=[scope])
    return user.from_authorized_user_info(dict(given))


def usable(token: Any) -> Any:
    """What gcsfs takes. A token itself becomes credentials here: gcsfs would ask Google about it,
    which a private endpoint does not want and an offline host cannot. FileNotFoundError: no such file.
    """
    if is_raw(token):
        from google.oauth2.credentials import Credentials

        made: Any = Credentials
        return made(token)
    if not isinstance(token, str) or token in NAMED_TOKENS:
        return token
    path = os.path.expanduser(token)
    if not os.path.exists(path):
        raise FileNotFoundError(path)  # gcsfs would take the path for a token
    return path


def refresh(credentials: Any) -> None:
    """A new token, by google-auth's own request. Raises what it raises."""
    import requests
    from google.auth.transport.requests import Request

    with requests.Session() as session:
        credentials.refresh(Request(session))


def _aware(expiry: datetime | None) -> datetime | None:
    """google-auth's times are UTC and do not say so."""
    return expiry.replace(tzinfo=UTC) if expiry is not None and expiry.tzinfo is None else expiry
