"""What a manifest has to say: what its log entry says of it, and enough that something is looked at. Pure.

    contradictions(seal, manifest)    where the two differ, in words; nobody changes either later
    lacks(manifest)                   what every checkpoint lists and this one does not, "" for nothing

A digest binds a manifest to its seal, not the seal to its manifest; and a copy without its log has only
the manifest: one that lists nothing would be as clean as nothing can be.
"""

from __future__ import annotations

from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.paths import METADATA
from ckptfs.commit.save.planning import origins_of
from ckptfs.commit.state import split_name

__all__ = ["contradictions", "lacks"]


def contradictions(seal: Seal, manifest: Manifest) -> list[str]:
    """Return what the log says otherwise than the manifest.

    A part takes over what its whole says, so that of it only what it has itself is compared.

    Args:
        seal: The entry of the log.
        manifest: The manifest of the same save.
    """
    whole, part = split_name(seal.name)
    pairs: dict[str, tuple[object, object]] = {
        "save": (seal.save_id, manifest.save_id),
        "name": (part or whole, manifest.name),
        "step": (seal.step, manifest.step),
        "domains": (set(seal.domains), {d.id for d in manifest.domains}),
    }
    if part is None:
        pairs |= {
            "kind": (seal.artifact.value, manifest.artifact.value),
            "generation": (seal.base, manifest.base),
            "references": (set(seal.references), set(manifest.references)),
            "origins": (set(seal.origins), set(origins_of(manifest))),
            "parts": (_ids(seal), _ids(manifest)),
        }
    return [
        f"{what} {_shown(said)} in the log, {_shown(there)} in the manifest"
        for what, (said, there) in pairs.items()
        if said != there
    ]


def lacks(manifest: Manifest) -> str:
    """The file that a training state or weights cannot be without, and that ``manifest`` lacks; "" where there
    is none.
    """
    if manifest.parts or manifest.artifact is Kind.DIRECTORY:
        return ""
    path = f"{manifest.save_id}/{METADATA}"
    return "" if any(f.path == path for f in manifest.files) else path


def _ids(of: Seal | Manifest) -> set[tuple[str, str, str]]:
    return {(ref.name, ref.save_id, ref.digest) for ref in of.parts}


def _shown(value: object) -> str:
    if isinstance(value, (set, tuple)):
        return ", ".join(sorted(str(one) for one in value)) or "none"
    return str(value)
