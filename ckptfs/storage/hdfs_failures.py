"""What HDFS refuses, by the Java class that it names; and what its silence means.

    the NameNode or a DataNode answered with an error    raise refused(asked, status, body)
    no whole answer came                                 raise clients.failures.unanswered(asked, e)

    {"RemoteException": {"exception": "StandbyException", "message": ...}}
                                       `--> type, one sentence, what to do

Messages of HDFS are repeated, shortened, because they name the path, the quota or the user; those
about tokens are not. A page that is no RemoteException comes from something else than HDFS.
"""

from __future__ import annotations

import json
from typing import Final

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CredentialsError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.clients.failures import Asked, Dialect, Reason, clean

__all__ = ["DATA_NODE", "NAME_NODE", "no_data_node", "no_web_hdfs", "refused"]

_TLS_HINT = "name the certificate authority's file in session_verify"

NAME_NODE: Final = Dialect(
    "WebHDFS",
    bucket="NameNode",
    hints={
        Reason.NO_HOST: "check the host of the URI and this machine's DNS",
        Reason.REFUSED: "the port is dfs.namenode.http-address (9870, before Hadoop 3 50070), "
        "not the RPC port; and is the NameNode up?",
        Reason.CERTIFICATE: _TLS_HINT,
        Reason.NOT_TLS: "check use_https and the port: dfs.namenode.https-address is another one",
    },
)
DATA_NODE: Final = Dialect(
    "WebHDFS",
    bucket="DataNode",
    hints={
        Reason.NO_HOST: "the NameNode sends every client to DataNodes by their own names: make "
        "them resolve here, or map them with the storage option data_proxy, a dict from theirs to ours",
        Reason.REFUSED: "is that DataNode up, and is its HTTP port open from here? data_proxy maps "
        "addresses that differ here",
        Reason.UNREACHABLE: "is its HTTP port open from here? data_proxy maps addresses that differ",
        Reason.BROKEN: "its log says why; before Hadoop 3 a quota of space that is used up ends so too",
        Reason.CERTIFICATE: _TLS_HINT,
    },
)

_READ_IN_FULL: Final = "look it up again"
_TOKENS: Final = "renew it: kinit, or a new delegation token"

# By simple class name: Hadoop moved classes between packages, never renamed them.
_CLASSES: Final[dict[str, tuple[type[StorageError], str, str | None]]] = {
    "FileNotFoundException": (NotFoundError, "no such file", None),
    "PathNotFoundException": (NotFoundError, "no such file", None),
    "ParentNotDirectoryException": (NotFoundError, "a component of the path is a file", None),
    "FileAlreadyExistsException": (AlreadyExistsError, "it exists", None),
    "PathIsNotEmptyDirectoryException": (AlreadyExistsError, "the directory is not empty", None),
    "AccessControlException": (
        AccessError,
        "this user may not do it{said}",
        "check owner, group and mode, and the storage option user (or HADOOP_USER_NAME)",
    ),
    "AuthorizationException": (
        AccessError,
        "this user may not act for another{said}",
        "allow it with hadoop.proxyuser.* on the NameNode, or drop proxy_to",
    ),
    "SnapshotAccessControlException": (AccessError, "a snapshot cannot be changed", None),
    "SnapshotException": (
        AccessError,
        "a snapshot holds it{said}",
        "delete the snapshots of this directory first",
    ),
    "InvalidToken": (CredentialsError, "the delegation token is not valid any more", _TOKENS),
    "TokenExpiredException": (CredentialsError, "the credentials have expired", _TOKENS),
    "AuthenticationException": (CredentialsError, "it does not accept these credentials", _TOKENS),
    "SecurityException": (CredentialsError, "it does not accept these credentials", _TOKENS),
    "StandbyException": (
        TransientError,
        "this NameNode is in standby: another one is active",
        "name the active NameNode, or a proxy that follows it; hdfs://nameservice finds it",
    ),
    "ObserverRetryOnActiveException": (TransientError, "only the active NameNode may", None),
    "RetriableException": (TransientError, "it asks to try again later{said}", None),
    "SafeModeException": (
        TransientError,
        "HDFS is in safe mode and takes no changes",
        "it leaves that when enough blocks are reported, or with hdfs dfsadmin -safemode leave",
    ),
    "ServerTooBusyException": (TransientError, "it is too busy", None),
    "SocketTimeoutException": (TransientError, "a DataNode was silent for too long", None),
    "ConnectException": (TransientError, "it could not reach another node{said}", None),
    "NoRouteToHostException": (TransientError, "it could not reach another node{said}", None),
    "ClosedChannelException": (TransientError, "a connection between DataNodes broke", None),
    "BlockMissingException": (
        TransientError,
        "no living DataNode holds a block of it{said}",
        "bring the DataNodes back: hdfs fsck names the blocks",
    ),
    "NSQuotaExceededException": (NoSpaceError, "the quota of names is used up{said}", None),
    "DSQuotaExceededException": (NoSpaceError, "the quota of space is used up{said}", None),
    "QuotaByStorageTypeExceededException": (
        NoSpaceError,
        "a storage type's quota is used up",
        None,
    ),
    "QuotaExceededException": (NoSpaceError, "a quota is used up{said}", None),
    "DiskOutOfSpaceException": (NoSpaceError, "a DataNode's disk is full", None),
    "LeaseExpiredException": (StaleError, "the file was taken from its writer", _READ_IN_FULL),
    "AlreadyBeingCreatedException": (TransientError, "another writer holds the file", None),
    "RecoveryInProgressException": (TransientError, "its lease is being recovered", None),
    "UnsupportedOperationException": (UnsupportedError, "it cannot do that{said}", None),
    "IllegalArgumentException": (StorageError, "it refused the request{said}", None),
}
# What arrives as a plain IOException, by its words.
_PHRASES: Final = (
    ("could only be replicated to", "NO_DATANODE"),
    ("could only be written to", "NO_DATANODE"),
    ("Failed to find datanode", "NO_DATANODE"),
    ("Name node is in safe mode", "SafeModeException"),
    ("Could not obtain block", "BlockMissingException"),
    ("is not supported in state standby", "StandbyException"),
    ("InvalidToken", "InvalidToken"),
    ("No space left on device", "DiskOutOfSpaceException"),
)
_BUSY: Final = frozenset((429, 503))
_GATEWAY: Final = frozenset((502, 504))
_UNAUTHORIZED: Final = 401
_SERVER_ERRORS: Final = 500


def refused(asked: Asked, status: int, body: bytes) -> StorageError:
    """The error for an answer that says no. Not raised yet."""
    name, message = _remote(body)
    for phrase, meant in _PHRASES:
        if phrase in message:
            name = meant
    if name == "NO_DATANODE":
        return no_data_node(asked)
    if name in _CLASSES:
        kind, sentence, hint = _CLASSES[name]
        return _told(asked, kind, sentence.format(said=_quoted(message)), hint)
    if name:
        return _told(asked, StorageError, f"it answered {name}{_quoted(message)}", None)
    return _no_hdfs(asked, status, body)


def no_data_node(asked: Asked) -> StorageError:
    """HDFS found nobody to take a block."""
    return _told(
        asked,
        TransientError,
        "no DataNode takes a block: all are dead, full or excluded",
        "look at hdfs dfsadmin -report",
    )


def _no_hdfs(asked: Asked, status: int, body: bytes) -> StorageError:
    """An answer of a proxy, of a wrong port, or of a servlet container."""
    if status == _UNAUTHORIZED:
        return _told(
            asked,
            CredentialsError,
            "it wants to know who this is",
            "pass kerberos=True after kinit, a delegation token, or user",
        )
    if status in _BUSY:
        return _told(asked, TransientError, f"it is too busy ({status})", None)
    if status in _GATEWAY or status >= _SERVER_ERRORS:
        kind = AnswerLostError if asked.changes else TransientError
        return _told(asked, kind, f"it failed with {status}", None)
    if b"Hadoop IPC port" in body:
        return no_web_hdfs(asked, "that is the RPC port")
    return no_web_hdfs(asked, f"this is no WebHDFS: it answered {status}")


def no_web_hdfs(asked: Asked, sentence: str = "this is no WebHDFS") -> StorageError:
    """Something else answers there; never "not found"."""
    hint = "use the port of dfs.namenode.http-address, and check dfs.webhdfs.enabled"
    return _told(asked, StorageError, sentence, hint)


def _told(asked: Asked, kind: type[StorageError], sentence: str, hint: str | None) -> StorageError:
    verb = "may have happened" if kind is AnswerLostError else "failed"
    where = f"{asked.dialect.bucket} {asked.endpoint}"
    return kind(f"{asked.action} {verb}: {where}: {sentence}", uri=asked.uri, hint=hint)


def _remote(body: bytes) -> tuple[str, str]:
    try:
        told = json.loads(body)["RemoteException"]
        return str(told["exception"]), str(told.get("message") or "")
    except (ValueError, KeyError, TypeError):
        return "", ""


def _quoted(message: str) -> str:
    first = message.partition("\n")[0]
    return f" ({clean(first)})" if first else ""
