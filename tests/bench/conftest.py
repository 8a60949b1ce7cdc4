"""The object store of the tests of engines."""

from __future__ import annotations

from tests.servers.conftest import no_accounts, radosgw

__all__ = ["no_accounts", "radosgw"]
