"""The content of a run. Read-only: nothing here appends, repairs or probes.

    catalog     saves that the logs list, and one process's look at a run
    unlogged    checkpoints that no log lists: copied here, or written by stock torch
    locate      a checkpoint found from all ranks: one answer, the same on every rank

    logs --fold--> views --catalog--> live saves --find--> Found(manifest, where its files are now)

All three are entry points.
"""
