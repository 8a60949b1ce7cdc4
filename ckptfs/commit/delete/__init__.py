"""Removing committed checkpoints: the entry first, the bytes later, always by rename.

    deletion_steps     delete entry --> erase: rename to trash, unlink there --> "gone" entry
                         |                 |
                         |              trash/<generation>/   and what was moved by mistake goes back
                         v
                       shared_data      which files another save still uses

Entry points:

    deletion_steps      the programs of one domain: retention, recovery, saves that were removed by hand
    delete_checkpoint   one checkpoint by its name, for callers without a run
    shared_data         how a save takes files over, and where they are

``erase`` and ``trash`` are internal: nothing is unlinked before its entry is in the log.
``commit.decisions`` decides what may be deleted.
"""
