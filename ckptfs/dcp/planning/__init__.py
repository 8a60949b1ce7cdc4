"""Plan a save: the plan of each rank, and what the coordinator decides from all plans.

    state dict --state_dicts--> flat dict --SavePlanner--> plan of a rank     leaves: refused or fingerprinted
                                                         |
                                 columns (bytes)  <------+
                                     |
    coordinator          global_plan: who writes what, and that nothing is left out
                                     |
    every rank           a bitmap of what it writes (``dcp.write.pipeline`` exchanges it)

Entry points:

    save_planner     the planner, for torch's own ``dcp.save`` too, and a rank's share of a save
    global_plan      the coordinator's decision, which ``metadata.metadata_writer`` describes
    leaves, state_dicts, columns    shared by saves, loads and the tools
    saved_state      what a checkpoint holds below a path, and blanks to load it into
"""
