"""Whether a run log can be acted upon: it has no gap, and this version understands it. No torch.

No reader reads entries behind a gap. An append there would take the number of the missing entry, which
could then never be restored. If a newer version wrote an entry (a hold, a reference), its meaning is
unknown here. So nothing is deleted, pinned or called dead by such a log.
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
    """Check that readers find the log in ``look``.

    Raises:
        ManifestError: There is a log that no reader finds, because the id of its domain is gone.
    """
    if not look.views and listed(look.storage, LOG):
        raise ManifestError(
            f"{DOMAIN} is missing next to a run log, so its content is unknown",
            uri=look.root,
            hint="its id is in the seals (ckptfs log): write it back, or copy the checkpoints "
            "that you need into another run",
        )
