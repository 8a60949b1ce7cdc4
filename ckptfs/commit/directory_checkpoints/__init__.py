"""Directories of files with plain names as checkpoints: written by anybody, read by ``open``.

    write    mounted: the attempt's directory itself    elsewhere: each rank uploads its share
    read     mounted: the step directory itself         elsewhere: one download per node, verified

Both are ways in.
"""
