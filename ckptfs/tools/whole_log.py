"""Whether a run log can be acted upon: whole, and of a version that is known here. No torch.

What lies behind a gap is read by nobody, and an append there takes the number of the entry that is
missing, which can then never be restored. What a newer version meant by an entry (a hold, a reference)
is not known. So nothing is deleted, pinned or called dead by such a log.
"""

from __future__ import annotations

from ckptfs.commit.catalog.catalog import Look, refuse_gap
from ckptfs.commit.paths import DOMAIN, LOG
from ckptfs.errors import ManifestError
from ckptfs.tools.debris import listed

__all__ = ["refuse_gap", "refuse_lost_domain", "refuse_newer"]


def refuse_newer(look: Look) -> None:
    """Check that this version understands the log in ``look``.

    Raises:
        ManifestError: A newer version wrote something that this one does not know.
    """
    if any(state.foreign for state in look.views.values()):
        raise ManifestError(
            "a newer version of ckptfs wrote to this run: what it meant is not known here",
            uri=look.root,
            hint="upgrade ckptfs",
        )


def refuse_lost_domain(look: Look) -> None:
    """Check that the log in ``look`` is one that readers find.

    Raises:
        ManifestError: There is a log that no reader finds: the id of its domain is gone.
    """
    if not look.views and listed(look.storage, LOG):
        raise ManifestError(
            f"{DOMAIN} is missing next to a run log, so its content is unknown",
            uri=look.root,
            hint="its id is in the seals (ckptfs log): write it back, or copy the checkpoints "
            "that you need into another run",
        )
