"""The commit protocol: generators that yield storage operations, and their driver. No torch.

                    operations   what a program yields, and ``drive``, which does it on a storage
                    session      a rank's storage, control and domains at a run
                    paths        the key of every file and directory of a run
                        |
    log             entries of one domain --fold--> what they mean  --append--> the next entry
                        |
    state           what the logs of all domains say together
    decisions       what the next entry may say
                        |
    save            one save: plan, files, seal in every domain, projection
    ownership       a claim fences older writers; recovery of what they left
    delete          the entry first, the bytes later
    catalog         what is there, read-only
    parts           one checkpoint of several groups of processes
    directory_checkpoints   files with plain names, written by any program

``manifest`` and ``digests`` are the files that describe a checkpoint. Programs hold the protocol
and no I/O, ``drive`` holds the I/O and no protocol: the tests' search runs the same programs
against a model of storage.
"""
