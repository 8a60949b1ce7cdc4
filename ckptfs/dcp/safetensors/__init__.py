"""Directories of safetensors files: written by all ranks together, and read as a checkpoint.

    state dict --exporter--> which file, which rank --> gather, a thread that writes --> files, index
    files, index --safetensors_reader--> metadata and Reads, as if they were a checkpoint

Entry points:

    exporter             a collective export
    safetensors_reader   a directory of such files, as a load's source
    safetensors_format   the header of one file
"""
