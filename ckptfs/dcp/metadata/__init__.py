"""``.metadata``, torch's description of a checkpoint: written, and read without trust.

    write    World, or torch's objects --metadata_writer--> bytes
    read     bytes --metadata_reader--> Inventory  (by key; torch's objects only on request)
                         |
                         +-- metadata_pickle, pickle_records: the pickle decoded, never run

Entry points:

    metadata_writer  from the columns of a save's plan, or from torch's objects
    metadata_reader  what a load needs to know, by key
    torch_inventory  the same of torch's objects
    pickle_scan      checks what ``torch.save`` wrote before torch unpickles it
"""
