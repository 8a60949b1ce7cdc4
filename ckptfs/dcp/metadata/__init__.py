"""``.metadata``, torch's description of a checkpoint: written, and read without trust.

    write    World, or torch's objects --metadata_writer--> bytes
    read     bytes --metadata_reader--> Inventory  (by key; torch's objects only when asked for)
                         |
                         +-- metadata_pickle, pickle_records: the pickle decoded, never run

Ways in:

    metadata_writer  from the columns of a save's plan, or from torch's objects
    metadata_reader  what a load asks of it, by key
    pickle_scan      what ``torch.save`` wrote, looked at before torch unpickles it
"""
