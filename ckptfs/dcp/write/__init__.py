"""Data files: from a plan and tensors to files with digests.

    pipeline        plan (step) -> space (step) -> write (local) -> describe (coordinator)
       rank_files      the data files of a rank: how many, which items, how one is written, digests beside them
          file_layout -> parallel_windows    every offset is known: several threads
          stream                             one stream in order, for object stores

Ways in:

    pipeline         the stages of a save
    rank_files       for saves with a plan of their own (incremental, torch's hooks)
    file_layout      where torch puts a tensor's memory in its blob: readers look there
    host_memory      the memory of a tensor as bytes
"""
