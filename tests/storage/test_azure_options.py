"""What options, environment and URI of Azure mean; nothing here asks a server."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from ckptfs.errors import UriError
from ckptfs.storage.clients.azure_options import (
    Anonymous,
    Default,
    Login,
    Principal,
    Sas,
    SharedKey,
    Token,
    resolve,
)
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

KEY = base64.b64encode(b"a key that nobody has").decode()
SAS = "sv=2022-11-02&se=2999-01-01T00%3A00%3A00Z&sp=rw&sig=abc%3D"
AZ = "az://box/run"
ABFS = "abfss://box@mine.dfs.core.windows.net/run"
CONNECTION = f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={KEY}"


class Identity:
    """An object of azure.identity, as far as it is asked before the first request."""

    def get_token(self, *scopes: str) -> None:
        """Never called here."""


def _resolve(uri: str, options: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Any:
    return resolve(Uri.parse(uri), options, Times(), env or {})


@pytest.mark.parametrize(
    ("uri", "options", "env", "endpoint"),
    [
        (AZ, {"account_name": "mine"}, {}, "https://mine.blob.core.windows.net"),
        (AZ, {}, {"AZURE_STORAGE_ACCOUNT_NAME": "env"}, "https://env.blob.core.windows.net"),
        (ABFS, {}, {}, "https://mine.blob.core.windows.net"),
        (ABFS, {"account_name": "mine"}, {}, "https://mine.blob.core.windows.net"),
        (
            "abfs://box@mine.dfs.core.chinacloudapi.cn/run",
            {},
            {},
            "https://mine.blob.core.chinacloudapi.cn",
        ),
        (AZ, {"account_name": "mine", "account_host": "a.b.example"}, {}, "https://a.b.example"),
        (
            AZ,
            {"account_name": "mine", "location_mode": "secondary"},
            {},
            "https://mine-secondary.blob.core.windows.net",
        ),
        (AZ, {"connection_string": CONNECTION}, {}, "https://mine.blob.core.windows.net"),
        (
            AZ,
            {"connection_string": f"{CONNECTION};EndpointSuffix=core.usgovcloudapi.net"},
            {},
            "https://mine.blob.core.usgovcloudapi.net",
        ),
        (
            AZ,
            {"connection_string": f"{CONNECTION};BlobEndpoint=http://127.0.0.1:1/mine/"},
            {},
            "http://127.0.0.1:1/mine",
        ),
        (
            AZ,
            {},
            {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"},
            "http://127.0.0.1:10000/devstoreaccount1",
        ),
    ],
)
def test_where(uri: str, options: dict[str, Any], env: dict[str, str], endpoint: str) -> None:
    """Account, host and container come from the URI, the options, then the environment."""
    account = _resolve(uri, options, env)
    assert (account.endpoint, account.container) == (endpoint, "box")


@pytest.mark.parametrize(
    ("options", "env", "login"),
    [
        ({"account_key": KEY}, {}, SharedKey("mine", KEY)),
        ({}, {"AZURE_STORAGE_ACCOUNT_KEY": KEY}, SharedKey("mine", KEY)),
        ({"sas_token": f"?{SAS}"}, {}, Sas(SAS)),
        ({}, {"AZURE_STORAGE_SAS_TOKEN": SAS}, Sas(SAS)),
        ({"account_key": KEY, "sas_token": SAS}, {}, SharedKey("mine", KEY)),
        ({"credential": SAS}, {}, Sas(SAS)),
        ({"credential": KEY}, {}, SharedKey("mine", KEY)),
        (
            {"credential": {"account_name": "mine", "account_key": KEY}},
            {},
            SharedKey("mine", KEY),
        ),
        (
            {"client_id": "c", "client_secret": "s", "tenant_id": "t"},
            {},
            Principal("t", "c", "s"),
        ),
        ({}, {}, Default({})),
        (
            {"exclude_cli_credential": True, "managed_identity_client_id": "m"},
            {},
            Default({"exclude_cli_credential": True, "managed_identity_client_id": "m"}),
        ),
        ({"anon": True}, {}, Anonymous()),
        ({"anon": "true"}, {}, Anonymous()),
        ({"anon": "false"}, {}, Default({})),
        ({"anon": False}, {"AZURE_STORAGE_ANON": "true"}, Default({})),
        ({}, {"AZURE_STORAGE_ANON": "true"}, Anonymous()),
        ({"anon": True, "account_key": KEY}, {}, SharedKey("mine", KEY)),
        ({"connection_string": CONNECTION, "sas_token": SAS}, {}, SharedKey("mine", KEY)),
        (
            {
                "connection_string": "BlobEndpoint=https://mine.blob.core.windows.net;"
                f"SharedAccessSignature={SAS}"
            },
            {},
            Sas(SAS),
        ),
    ],
)
def test_who(options: dict[str, Any], env: dict[str, str], login: Login) -> None:
    """The login that wins, in adlfs's order."""
    assert _resolve(AZ, {"account_name": "mine", **options}, env).login == login


def test_credential_objects() -> None:
    """Objects of azure.identity and azure.core are taken as they are, renewals included."""
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential

    identity, sas = Identity(), AzureSasCredential(SAS)
    options: dict[str, Any] = {"account_name": "mine"}
    assert _resolve(AZ, {**options, "credential": identity}).login == Token(identity)
    found = _resolve(AZ, {**options, "credential": sas}).login
    sas.update("sig=new")
    assert found.text == "sig=new"
    named = AzureNamedKeyCredential("mine", KEY)
    assert _resolve(AZ, {**options, "credential": named}).login == SharedKey("mine", KEY)


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ({"account_name": "mine", "account_key": KEY}, {}),
        ({"account_name": "mine", "sas_token": SAS}, {}),
        ({"account_name": "mine", "account_key": KEY, "sas_token": SAS}, {}),
        ({"account_name": "mine", "anon": True}, {}),
        ({"account_name": "mine", "credential": SAS}, {}),
        ({"account_name": "mine", "sas_token": SAS, "account_host": "x.example"}, {}),
        ({"account_name": "mine", "account_key": KEY, "location_mode": "secondary"}, {}),
        ({"connection_string": CONNECTION}, {}),
        ({"account_key": KEY}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}),
        ({"account_name": "mine"}, {"AZURE_STORAGE_SAS_TOKEN": SAS}),
        ({"account_name": "mine"}, {"AZURE_STORAGE_ANON": "1"}),
    ],
)
def test_adlfs_reads_them_the_same(
    options: dict[str, Any], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoint, query and kind of login are those of adlfs's own client for the same options."""
    adlfs = pytest.importorskip("adlfs")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    theirs = adlfs.AzureBlobFileSystem(skip_instance_cache=True, **options).service_client
    ours = _resolve(AZ, options, env)
    endpoint, _, query = theirs.url.partition("?")
    assert ours.endpoint == endpoint.rstrip("/")
    assert query == (ours.login.text if isinstance(ours.login, Sas) else "")
    key = getattr(theirs.credential, "account_key", None)
    assert key == (ours.login.key if isinstance(ours.login, SharedKey) else None)


@pytest.mark.parametrize(
    ("uri", "options", "told"),
    [
        (AZ, {"account_name": "mine", "acount_key": KEY}, "no storage option 'acount_key'"),
        (AZ, {"account_name": "mine", "endpoint_url": "http://x"}, "endpoint_url"),
        (AZ, {}, "Azure account is not known"),
        (ABFS, {"account_name": "other"}, "names account 'mine'"),
        (
            "abfss://box@other.dfs.core.windows.net/run",
            {"connection_string": CONNECTION},
            "'mine', but 'other'",
        ),
        ("abfss://mine.dfs.core.windows.net/run", {}, "no container"),
        ("abfss://box@localhost/run", {}, "not an Azure URI"),
        (AZ, {"account_name": "mine", "account_key": "not base64!"}, "account_key is not base64"),
        (AZ, {"account_key": KEY, "account_host": "h.example"}, "account_key without account_name"),
        (AZ, {"account_name": "mine", "client_id": "c"}, "client_id without tenant_id"),
        (AZ, {"account_name": "mine", "credential": 3}, "credential=int"),
        (AZ, {"connection_string": "nonsense"}, "not a list of name=value"),
        (AZ, {"connection_string": "EndpointSuffix=x"}, "neither AccountName"),
        (AZ, {"account_name": "mine", "location_mode": "both"}, "'primary' or 'secondary'"),
        (AZ, {"account_name": "mine", "version_aware": True}, "current versions only"),
        (AZ, {"account_name": "mine", "standard_blob_tier": "Archive"}, "'Hot', 'Cool' or 'Cold'"),
        (AZ, {"account_name": "mine", "tags": "a=b"}, "tags is not a mapping"),
        (AZ, {"account_name": "mine", "content_settings": {"md5": "x"}}, "content_settings has"),
        (AZ, {"account_name": "mine", "cpk": "c2hvcnQ="}, "256-bit"),
        (AZ, {"account_name": "mine", "validate_content": "md5"}, "true or false"),
        (
            AZ,
            {"account_name": "mine", "encryption_scope": "s", "cpk": "x"},
            "encryption_scope, but cpk",
        ),
    ],
)
def test_nonsense_is_refused(uri: str, options: dict[str, Any], told: str) -> None:
    """Unknown and contradictory options are UriErrors that name them, and never show a secret."""
    with pytest.raises(UriError) as caught:
        _resolve(uri, options)
    assert told in str(caught.value)
    assert KEY not in str(caught.value)
    assert "not base64!" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_what_is_stored() -> None:
    """Scope, tier, tags, metadata and content settings as the headers of the REST interface."""
    account = _resolve(
        AZ,
        {
            "account_name": "mine",
            "encryption_scope": "scope1",
            "standard_blob_tier": "cool",
            "tags": {"team": "a b", "x": "1&2"},
            "metadata": {"owner": "me"},
            "content_settings": {"content_type": "x/y", "cache_control": "no-store"},
        },
    )
    assert account.storing() == {
        "x-ms-encryption-scope": "scope1",
        "x-ms-access-tier": "Cool",
        "x-ms-tags": "team=a+b&x=1%262",
        "x-ms-meta-owner": "me",
        "x-ms-blob-content-type": "x/y",
        "x-ms-blob-cache-control": "no-store",
    }
    assert account.key_headers() == {}
    key = base64.b64encode(bytes(32)).decode()
    with_key = _resolve(AZ, {"account_name": "mine", "cpk": {"key_value": key}})
    assert with_key.key_headers() == {
        "x-ms-encryption-key": key,
        "x-ms-encryption-key-sha256": "Zmh6rfhivXdsj8GLjp+OIAiXFIVu4jOzkCpZHQ1fKSU=",
        "x-ms-encryption-algorithm": "AES256",
    }


def test_adlfs_options_without_a_meaning_here_are_taken() -> None:
    """A dictionary that serves pandas too is not refused; its timeouts count."""
    account = _resolve(
        AZ,
        {
            "account_name": "mine",
            "max_concurrency": 4,
            "request_session": object(),
            "blocksize": 1,
            "skip_instance_cache": True,
            "connection_timeout": 3,
            "read_timeout": 7,
        },
    )
    assert account.times == Times(3.0, 7.0)


def test_secrets_are_in_no_repr() -> None:
    """Neither the account nor its login shows what it holds; both travel with it."""
    for options in ({"account_key": KEY}, {"sas_token": SAS}, {"credential": SAS}):
        account = _resolve(AZ, {"account_name": "mine", **options})
        assert KEY not in repr(account)
        assert "sig=" not in repr(account)
        assert pickle.loads(pickle.dumps(account)) == account
