"""Copies of checkpoints at other places: ``ckptfs cp``, ``gather`` and ``copies=`` use one copier.

plan               which checkpoints ``cp`` copies, by the catalogs of both places
copier             ``cp`` and ``gather``: plans, copies one checkpoint after another, reports
backlog            which committed saves a tier still lacks, and in which order they are copied
tiers              the thread that drains a run to its tiers while a job trains
checkpoint_copy    one checkpoint, collective, whole or not at all
copied_files       the bytes of one rank's files, each compared with its digests
"""
