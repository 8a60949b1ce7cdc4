"""cp to S3 and back, killed at ten random moments: what the issue asks to be shown, at full size."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import ckptfs
from tests.cli.conftest import no_accounts, radosgw
from tests.faults.proxy import Exchange, FaultProxy
from tests.lab.server import Server
from tests.tools.copy_rig import (
    a_big_run,
    answered_bytes,
    command,
    flags,
    ran,
    run_killed,
    same_data,
    sent_bytes,
)

__all__ = ["no_accounts", "radosgw"]

logger = logging.getLogger(__name__)

SIZE_BYTES = int(os.environ.get("CKPTFS_COPY_BYTES", str(2 * 10**9)))
SEED = int(os.environ.get("CKPTFS_SEED", "6"))
RANKS, KILLS, TWICE = 4, 5, 0.30  # kills each way; what may be sent twice


@pytest.mark.campaign
def test_ten_kills_between_a_disk_and_s3(tmp_path: Path, radosgw: Server) -> None:
    """Bit-exact, nothing committed before the end, and no more than 30 % goes over the wire twice."""
    source = a_big_run(tmp_path / "run", RANKS, SIZE_BYTES // RANKS // 8 * 8)
    there = radosgw.fresh()
    draw = random.Random(SEED)
    logger.warning("seed %d, %d bytes", SEED, SIZE_BYTES)
    with FaultProxy(radosgw.endpoint) as proxy:
        options = {
            name: proxy.url if value == radosgw.endpoint else value
            for name, value in radosgw.storage_options().items()
        }
        up = command(source / "step_1", f"{there}/step_1", *flags("-O", options))
        sent = killed_often(up, proxy, draw, sent_bytes, there, dict(radosgw.options))
        proxy.forget()
        back = tmp_path / "back"
        down = command(f"{there}/step_1", back / "step_1", *flags("-o", options))
        answered = killed_often(down, proxy, draw, answered_bytes, str(back), {})
    assert same_data(back / "step_1", source / "step_1")
    logger.warning("over the wire: %.3f of the size there, %.3f back", sent, answered)
    assert sent <= 1 + TWICE
    assert answered <= 1 + TWICE


def killed_often(
    words: Sequence[str],
    proxy: FaultProxy,
    draw: random.Random,
    count: Callable[[Sequence[Exchange]], int],
    target: str,
    options: dict[str, object],
) -> float:
    """Run it, killed at five random amounts of bytes, then to its end; bytes on the wire per size."""
    for left in range(KILLS, 0, -1):
        now = count(proxy.log)
        point = now + draw.uniform(0.02, 1) * max(0, SIZE_BYTES - now) / left
        assert run_killed(words, proxy, lambda log, point=point: count(log) >= point)
        assert ckptfs.list_checkpoints(target, storage_options=options) == []
        logger.warning("killed after %d bytes", count(proxy.log))
    code, out, err = ran(words)
    assert code == 0, err
    logger.warning("%s", out.splitlines()[-1])
    assert len(ckptfs.list_checkpoints(target, storage_options=options)) == 1
    return count(proxy.log) / SIZE_BYTES
