"""Hypothesis strategies for what names a place: URIs and keys, ordinary and awkward.

uris()          credential-free URIs of every kind that Uri.parse accepts
secret_uris()   (text, secret): URIs with a secret in the text that must never be shown
paths()         absolute POSIX paths as a user may write them, with //, . and ..
keys()          relative keys
"""

from __future__ import annotations

from hypothesis import strategies as st

from ckptfs.uri import Uri

__all__ = ["components", "keys", "paths", "secret_uris", "uris"]

_PORTLESS = ("s3", "gs", "az")
_BUCKET_PROTOCOLS = ("s3", "gs", "az", "memory", "hdfs", "sftp", "https", "myown")
_FILE_PROTOCOLS = ("file", "faults+file", "nodes+file", "faults+nodes+file", "fsspec+file")
_PLAIN = "abcXYZ019-_."


def components(*, awkward: bool = True) -> st.SearchStrategy[str]:
    """Return names: no slash, no control character, not "." or "..". With ``awkward`` they hold any letter."""
    plain = st.text(_PLAIN, min_size=1, max_size=12)
    any_letter = st.text(
        st.characters(codec="utf-8", exclude_characters="/\x7f", exclude_categories=("Cc", "Cs")),
        min_size=1,
        max_size=12,
    )
    chosen = st.one_of(plain, any_letter) if awkward else plain
    return chosen.filter(lambda name: name not in (".", ".."))


def keys(*, awkward: bool = True, max_depth: int = 4) -> st.SearchStrategy[str]:
    """Return relative keys of one to ``max_depth`` components; ``awkward`` as for ``components``."""
    parts = st.lists(components(awkward=awkward), min_size=1, max_size=max_depth)
    return parts.map("/".join)


def paths() -> st.SearchStrategy[str]:
    """Return absolute paths in the spellings that users produce."""
    step = st.one_of(components(), st.sampled_from(["", ".", ".."]))
    return st.lists(step, max_size=6).map(lambda parts: "/" + "/".join(parts))


def uris() -> st.SearchStrategy[Uri]:
    """Return parsed URIs without credentials: directories, wrappers of them, buckets, hosts with ports."""
    trees = st.builds(
        lambda protocol, key: Uri.parse(f"{protocol}:///{key}"),
        st.sampled_from(_FILE_PROTOCOLS),
        st.one_of(st.just(""), keys()),
    )
    host = st.text("abcdef0123456789-", min_size=1, max_size=10)
    port = st.one_of(st.just(""), st.integers(1, 65535).map(lambda number: f":{number}"))
    query = st.sampled_from(["", "?region=x", "?anon=true&versionid=3", "?endpoint=localhost"])
    buckets = st.builds(
        # Buckets have no port: "s3://0:1/@" would be a password with a slash in it, and is refused.
        lambda protocol, host, port, key, query: Uri.parse(
            f"{protocol}://{host}{'' if protocol in _PORTLESS else port}/{key}{query}"
        ),
        st.sampled_from(_BUCKET_PROTOCOLS),
        host,
        port,
        st.one_of(st.just(""), keys().filter(lambda key: "?" not in key)),
        query,
    )
    return st.one_of(trees, buckets)


def secret_uris() -> st.SearchStrategy[tuple[str, str]]:
    """A URI's text and the secret in it."""
    secret = st.text("SECRETsecret0123456789+=", min_size=8, max_size=20).map(lambda s: f"Zq{s}")
    shape = st.sampled_from(
        [
            "s3://AKIA:{}@bucket/run",
            "s3://{}@bucket/run",
            "sftp://login:{}@host:22/run",
            "https://host/run?sig={}&region=x",
            "abfs://box@account.dfs.core.windows.net/run?sas_token={}",
            "ckptfs+s3://AKIA:{}@bucket/a//b/",
            "gs://bucket/run?{}",
        ]
    )
    return st.builds(lambda text, held: (text.format(held), held), shape, secret)
