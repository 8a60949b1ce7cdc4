"""Read the data files of a load: from a plan and files to tensors, verified on the way.

    state dict --load_planner--> Reads (read_plan: which saved chunks fill which memory)
                                   |
    scheduler    files in order -> wants (requests) -> requests (data_file) -> threads (read_threads)
                                                                              |
    data_file    one ranged read, compared with its digests  <----------------+

Entry points:

    load_planner     what a state dict needs of a checkpoint
    read_plan        the Reads themselves, from our plans or torch's
    scheduler        fetches their bytes
    data_file        one open file and its requests, for callers that read a file directly
"""
