"""One group's side of a checkpoint of parts that are directories, see ``commit.part_dir``.

saver = PartSaver(is_async=True)
saver.save(part, framework.save)        part: of a driver's ticket, which decides over all parts
saver.wait()                            raises what the last one failed of, on all ranks

with reading_part(uri, place, only) as path: framework.load(path)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from ckptfs.commit.fetching import Wanted, fetched
from ckptfs.commit.locate import locate_directory, reading_seat
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat
from ckptfs.commit.part_dir import publish_part, writing_part
from ckptfs.commit.scratch import NodeScratch
from ckptfs.commit.tickets import SealedPart, TicketPart
from ckptfs.dcp.worker import SaveWorker
from ckptfs.errors import CollectiveError, NotFoundError
from ckptfs.topology.barriers import meeting_at_barriers
from ckptfs.topology.control import Control

__all__ = ["PartSaver", "reading_part"]


class PartSaver:
    """On every rank of a group; calls are collective. scratch: where an asynchronous save lies until
    it is uploaded, by default the temporary directory.
    """

    def __init__(
        self, *, is_async: bool, scratch: str | None = None, process_group: Any = None
    ) -> None:
        self._is_async = is_async
        self._scratch = scratch
        self._group = process_group
        self._worker: SaveWorker | None = None
        self._going: Future[SealedPart] | None = None

    def save(
        self,
        part: TicketPart,
        write: Callable[[str], None],
        then: Callable[[SealedPart], object] = lambda _: None,
        failed: Callable[[], None] = lambda: None,
    ) -> SealedPart | None:
        """Seal what ``write(path)`` writes. Returns the sealed part; in async mode None, when it is
        written to scratch. First raises what the save before failed of.

        write: somebody's own code, with barriers of its own. then, failed: called when it is sealed or
        is not, on every rank, in async mode by a thread. Any rank's failure is one of all.
        """
        self.wait()
        try:
            with contextlib.ExitStack() as stack:
                control = stack.enter_context(control_for(self._group, None))
                place = Place(part.storage_options)
                seat = stack.enter_context(open_seat(part.run, control, place, write=True))
                if not self._is_async:
                    done: list[SealedPart] = []
                    with writing_part(seat, part, done) as path, meeting_at_barriers(control):
                        write(path)
                    then(done[0])
                    return done[0]
                scratch = NodeScratch(control, "ckptfs-part-", self._scratch)
                scratch.mates = [control.rank]  # of this rank alone
                # In the block: of a disk that is full on one rank, all hear.
                with meeting_at_barriers(control):
                    path = scratch.make()
                    stack.callback(scratch.leave)
                    write(path)
                after = stack.pop_all()
        except BaseException:
            failed()
            raise

        def publish() -> SealedPart:
            with after:
                try:
                    sealed = publish_part(seat, part, scratch.path)
                    then(sealed)
                except BaseException:
                    failed()
                    raise
                return sealed

        if self._worker is None:
            self._worker = SaveWorker("ckptfs-part")
        self._going = self._worker.submit(f"saving {part.uri}", publish)
        return None

    def wait(self) -> None:
        """Wait for what is on its way, and raise what it failed of, on all ranks at the same call."""
        going, self._going = self._going, None
        if going is not None:
            going.result()

    def close(self) -> None:
        """As ``wait``, for good. Harmless twice."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.close()


@contextlib.contextmanager
def reading_part(
    uri: Any,
    place: Place,
    only: Wanted | None = None,
    *,
    otherwise: Callable[[], bool] = lambda: False,
    process_group: Any = None,
) -> Iterator[tuple[str | None, Control]]:
    """Collective, read-only. A path with what this node needs of a directory, or of a part.

    otherwise: asked on every rank where there is no such directory; if all say True, the path is None.
    NotFoundError, IncompleteCheckpointError: it is nowhere, or not whole. Also yields the control, for
    ``meeting_at_barriers``, which the block is run in.
    """
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(control_for(process_group, None))
        target = agree_uri(control, uri)
        path = None
        try:
            seat, name = stack.enter_context(reading_seat(target, control, place))
            found = locate_directory(seat, name)
        except CollectiveError:
            raise  # what single ranks met is a failure: nobody said that nothing is there
        except NotFoundError:
            if not control.step("otherwise", otherwise, all):
                raise
        else:
            path = stack.enter_context(fetched(seat, found, only=only))
        with meeting_at_barriers(control):
            yield path, control
