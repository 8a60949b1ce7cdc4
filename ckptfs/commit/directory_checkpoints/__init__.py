"""Directories of files with plain names as checkpoints: any program writes them and reads them.

    write    mounted: the attempt's directory itself    elsewhere: each rank uploads its share
    read     mounted: the step directory itself         elsewhere: one download per node, verified

Both modules are entry points.
"""
