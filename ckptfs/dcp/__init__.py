"""The adapter to torch.distributed.checkpoint: plans, data files and metadata. No retention here.

save    api -> saving  -> planning -> write -> commit
load    api -> loading -> metadata -> read

planning/       what each rank saves, and what the coordinator decides from all plans
metadata/       ``.metadata``, written and read without trust
write/  read/   data files and their digests
staging/        the copy of the state that ``async_save`` writes from
incremental/    ``unchanged="reference"``
torch_hooks/    the same under torch's own ``dcp.save`` and ``dcp.load``
safetensors/    directories of safetensors files

api.py  async_api.py    ``save``, ``load``, ``async_save``; pending.py is what async_save returns
saving.py  loading.py   one save and one load on an open session, for the calls above and the manager
worker.py               the thread that saves in the background
object_file.py          one object in one file
boxes.py                boxes of a row-major tensor as ranges of bytes, and whether they fill it
planner.py              the save planner under its documented name
python_gc.py            Python's garbage collector, paused while many objects are made
"""
