"""Real servers do all that a storage must do, through both clients of each.

    radosgw   s3fs, obstore     the S3 of record
    moto      s3fs, obstore     quoted etags; small files only, the rest is as on Ceph
    gcs       gcsfs, obstore    generations for etags; gcsfs by FsspecStorage

Azurite is in test_azure_storage.py, HDFS in test_hdfs_conformance.py. Parts are as small as S3 takes
them, so that the larger files of the suite are uploads in parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.testing._conformance.base import Conformance
from ckptfs.testing._conformance.small import SmallFiles
from ckptfs.testing.conformance import StorageConformance
from tests.lab import raw
from tests.lab.server import Server


@pytest.fixture(scope="module")
def behind_radosgw(radosgw: Server) -> Any:
    """boto3 on Ceph; making one takes longer than most of these tests."""
    return raw.s3(radosgw)


@pytest.fixture(scope="module")
def behind_moto(moto: Server) -> Any:
    """boto3 on moto."""
    return raw.s3(moto)


class OnServer(Conformance):
    """A prefix of its own for every test; the bucket goes with the server."""

    library: str

    def opened(self, server: Server) -> Storage:
        """The storage under test, at an unused prefix."""
        self.server = server
        root = server.fresh("conformance")
        self.base = root.removeprefix(f"{server.uri()}/")
        options = server.storage_options(client=self.library, part_size_bytes="1 MiB")
        return open_storage(root, options)


class OnS3(OnServer):
    """The raw hooks of S3, through boto3."""

    client: Any

    def make_storage(self, place: Path) -> Storage:
        return self.opened(self.server)

    def raw_write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.server.bucket, Key=f"{self.base}/{key}", Body=data)

    def raw_read(self, key: str) -> bytes:
        found = self.client.get_object(Bucket=self.server.bucket, Key=f"{self.base}/{key}")
        return bytes(found["Body"].read())

    def raw_exists(self, key: str) -> bool:
        return key in self.raw_list()

    def raw_list(self) -> list[str]:
        # Nothing is left behind: no object, and no uncompleted upload.
        where = {"Bucket": self.server.bucket, "Prefix": f"{self.base}/"}
        assert not self.client.list_multipart_uploads(**where).get("Uploads")
        found = self.client.list_objects_v2(**where).get("Contents", [])
        return sorted(item["Key"].removeprefix(f"{self.base}/") for item in found)


class OnRadosgw(OnS3, StorageConformance):
    """Ceph."""

    @pytest.fixture(autouse=True)
    def _server(self, radosgw: Server, behind_radosgw: Any) -> None:
        self.server, self.client = radosgw, behind_radosgw


class OnMoto(OnS3, SmallFiles):
    """moto."""

    @pytest.fixture(autouse=True)
    def _server(self, moto: Server, behind_moto: Any) -> None:
        self.server, self.client = moto, behind_moto


class TestRadosgwS3fs(OnRadosgw):
    """Ceph through s3fs's library."""

    library = "s3fs"


class TestRadosgwObstore(OnRadosgw):
    """Ceph through obstore."""

    library = "obstore"


class TestMotoS3fs(OnMoto):
    """moto through s3fs's library."""

    library = "s3fs"


class TestMotoObstore(OnMoto):
    """moto through obstore."""

    library = "obstore"


class OnGcs(OnServer, StorageConformance):
    """The raw hooks of Google's JSON API."""

    @pytest.fixture(autouse=True)
    def _server(self, gcs: Server) -> None:
        self.server = gcs

    def make_storage(self, place: Path) -> Storage:
        return self.opened(self.server)

    def raw_write(self, key: str, data: bytes) -> None:
        raw.gcs_put(self.server, f"{self.base}/{key}", data)

    def raw_read(self, key: str) -> bytes:
        return raw.gcs_get(self.server, f"{self.base}/{key}")

    def raw_exists(self, key: str) -> bool:
        return key in self.raw_list()

    def raw_list(self) -> list[str]:
        prefix = f"{self.base}/"
        return [key.removeprefix(prefix) for key in raw.gcs_keys(self.server, prefix)]


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp's, to gcsfs
class TestGcsGcsfs(OnGcs):
    """FsspecStorage over gcsfs, which is used where obstore cannot express an option."""

    library = "gcsfs"


class TestGcsObstore(OnGcs):
    """The XML API through obstore."""

    library = "obstore"
