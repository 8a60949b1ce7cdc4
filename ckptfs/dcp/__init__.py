"""The adapter to torch.distributed.checkpoint: plans, data files, metadata, and nothing of retention.

planner.py  load_planner.py    what to save and to load, and every check that needs no data
leaves.py  per_rank.py         fingerprints and safety of leaves; what each rank keeps for itself
columns.py  exchange.py        plans as columns: what ranks say of them, sent once
world_plan.py  emit.py         the coordinator's decision over columns, and ``.metadata`` made of them
layout.py  engine.py           data files and their digests, written
fetch.py                       data files, read and verified, into tensors
metadata.py  decoding.py       ``.metadata``, byte for byte torch's, and read without trust
metadata_pickle.py pickle_records.py its pickle, decoded and not run; its usual records, many at a time
inventory.py what a load asks of it, by key
pipeline.py                    plan, write, describe; plan, read: for ckptfs.save and ckptfs.load
writer.py  reader.py           the same under torch's own dcp.save and dcp.load
"""
