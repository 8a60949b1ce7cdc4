"""Which client library is taken, and what is said where none can be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckptfs.errors import MissingDriverError, UriError
from ckptfs.storage.clients import choose
from ckptfs.storage.clients.choose import choose_path, open_client
from ckptfs.storage.options import ObjectOptions, Times
from ckptfs.uri import Uri

Given = tuple[str, dict[str, Any], Times]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says which libraries there are; clients are stand-ins that answer their module's name.

    obstore's cannot do "acl".
    """

    def these(names: str) -> None:
        there = names.split()
        monkeypatch.setattr(choose, "find_spec", lambda n: object() if n in there else None)

    def module(name: str) -> Any:
        def open_it(uri: Uri, options: dict[str, Any], times: Times) -> Given:
            return name.rpartition(".")[2], options, times

        return SimpleNamespace(
            open_client=open_it,
            unsupported_option=lambda options: "it has no acl" if "acl" in options else None,
        )

    monkeypatch.setattr(choose, "import_module", module)
    return these


def taken(text: str, client: str = "auto", **rest: Any) -> Any:
    """What the stand-in answers: its module's name, the options, the times; of the fsspec library where
    there is no client on it, its name.
    """
    options, uri = ObjectOptions(client=client, times=Times(1.0, 2.0)), Uri.parse(text)
    path = choose_path(uri, client, rest)
    if not path.is_obstore:
        return path.library, rest, options.times
    return open_client(uri, options, rest)


def fast_of(module: str) -> str:
    """The module of obstore's client and that of the other library."""
    return {"gcsfs": "gcs", "adlfs": "azure", "s3fs": "s3"}[module]


URIS = [
    ("s3://b/k", "s3fs", "s3fs"),
    ("s3a://b/k", "s3fs", "s3fs"),
    ("gs://b/k", "gcsfs", "gcsfs"),
    ("gcs://b/k", "gcsfs", "gcsfs"),
    ("az://b/k", "adlfs", "adlfs"),
    ("abfs://b@a.x/k", "adlfs", "adlfs"),
    ("abfss://b@a.x/k", "adlfs", "adlfs"),
]


@pytest.mark.parametrize(("text", "library", "module"), URIS)
def test_auto_takes_obstore_where_it_can(
    text: str, library: str, module: str, installed: Callable[[str], None]
) -> None:
    """Both are there: obstore; one of the two: that one."""
    installed(f"obstore {library}")
    fast = fast_of(module)
    assert taken(text, key="k") == (fast, {"key": "k"}, Times(1.0, 2.0))
    installed("obstore")
    assert taken(text)[0] == fast
    installed(library)
    assert taken(text)[0] == module


def test_auto_leaves_obstore_in_a_forked_child(
    installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not survive a fork; the other library does."""
    installed("obstore s3fs")
    monkeypatch.setattr(choose, "is_forked", lambda: True)
    assert taken("s3://b/k")[0] == "s3fs"
    installed("obstore")
    assert taken("s3://b/k")[0] == "s3"


def test_auto_takes_the_other_where_obstore_cannot(
    installed: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """An option that obstore cannot express is never dropped; the log says why."""
    installed("obstore s3fs")
    with caplog.at_level(logging.INFO):
        assert taken("s3://b/k", acl="private")[0] == "s3fs"
    assert "it has no acl" in caplog.text
    installed("obstore")
    with pytest.raises(MissingDriverError, match=r"ckptfs\[s3\]"):
        taken("s3://b/k", acl="private")


@pytest.mark.parametrize(("text", "library", "module"), URIS)
def test_a_library_by_name(
    text: str, library: str, module: str, installed: Callable[[str], None]
) -> None:
    """It is taken, or missed by name; nothing else is tried instead."""
    installed(f"obstore {library}")
    assert taken(text, library)[0] == module
    assert taken(text, "obstore")[0] == fast_of(module)
    installed("")
    with pytest.raises(MissingDriverError, match=library):
        taken(text, library)
    with pytest.raises(MissingDriverError, match="obstore"):
        taken(text, "obstore")
    with pytest.raises(MissingDriverError):
        taken(text)


def test_what_cannot_be_is_an_error(installed: Callable[[str], None]) -> None:
    """Another store's library, or an option that the named one cannot do."""
    installed("obstore s3fs gcsfs")
    with pytest.raises(UriError, match="s3fs"):
        taken("s3://b/k", "gcsfs")
    with pytest.raises(UriError, match="it has no acl"):
        taken("s3://b/k", "obstore", acl="private")
