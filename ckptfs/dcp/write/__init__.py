"""Write the data files of a save: from a plan and tensors to files and their digests.

    pipeline        plan (step) -> space (step) -> write (local) -> describe (coordinator)
       rank_files      the data files of a rank: how many, which items, how one is written, its sidecar
          file_layout -> parallel_windows    every offset is known: several threads
          stream                             one stream in order, for object stores

Entry points:

    pipeline         the stages of a save
    rank_files       for saves with a plan of their own (incremental, torch's hooks)
    file_layout      where torch puts a tensor's memory in its blob; readers use it too
    host_memory      the memory of a tensor as bytes
"""
