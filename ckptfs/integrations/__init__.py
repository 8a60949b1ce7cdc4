"""Plug-ins for existing checkpoint managers, one module or package per framework.

    fsspec          ckptfs+file:// ckptfs+s3:// ...: no code at all for programs that use fsspec
    lightning  accelerate  transformers  deepspeed  torchtitan  verl  ray
    safetensors     Hugging Face checkpoints, written and read by all ranks

Each is imported only when it is used and does not depend on the others. None has a policy of its
own: what to keep, when to save and where to resume is decided by the managers.
"""
