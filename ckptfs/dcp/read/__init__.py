"""Data files: from a plan and files to tensors, verified on the way.

    state dict --load_planner--> Reads (read_plan: which saved chunks fill which memory; boxes)
                                   |
    scheduler    files in order -> wants (requests) -> requests (data_file) -> threads (read_threads)
                                                                              |
    data_file    one ranged read, compared with its digests  <----------------+

Ways in:

    load_planner     what a state dict needs of a checkpoint
    read_plan        the Reads themselves, from our plans or torch's
    scheduler        brings their bytes
    data_file        one open file and its requests, for whoever reads it by himself
    boxes            boxes of a row-major tensor as ranges of bytes
"""
