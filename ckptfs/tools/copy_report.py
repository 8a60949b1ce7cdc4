"""What a copy by hand came to: ``ckptfs.tools.copying`` returns it, ``ckptfs cp`` prints it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.tools.copy_plan import Status

__all__ = ["Copied", "CopyReport"]


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of one checkpoint. size_bytes: of its files, None where nobody was asked.

    copied_bytes went over to the target now; resumed_bytes were there from an interrupted try.
    digests: so many were compared.
    """

    name: str
    kind: str
    step: int | None
    uri: str
    save_id: str | None
    status: Status
    size_bytes: int | None
    copied_bytes: int = 0
    resumed_bytes: int = 0
    digests: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a call of ``copy_to`` came to. rank: this process's."""

    source: str
    target: str
    checkpoints: tuple[Copied, ...]
    seconds: float
    rank: int = 0
    warnings: tuple[str, ...] = ()
    is_dry_run: bool = False

    @property
    def copied_bytes(self) -> int:
        """Sent to the target now."""
        return sum(one.copied_bytes for one in self.checkpoints)

    @property
    def skipped_bytes(self) -> int:
        """That were there before: checkpoints already copied, and what interrupted tries brought."""
        whole = sum(one.size_bytes or 0 for one in self.checkpoints if one.status is Status.THERE)
        return whole + sum(one.resumed_bytes for one in self.checkpoints)

    @property
    def digests(self) -> int:
        """Compared."""
        return sum(one.digests for one in self.checkpoints)
