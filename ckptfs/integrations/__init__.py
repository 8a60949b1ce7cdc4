"""Plug-ins for the checkpoint managers that people already have, one module or package per framework.

    fsspec          ckptfs+file:// ckptfs+s3:// ...: no code at all for whatever speaks fsspec
    lightning  accelerate  transformers  deepspeed  torchtitan  verl  ray
    safetensors     Hugging Face checkpoints, written and read by all ranks

Each is imported only when it is used and knows nothing of the others. None holds a policy: what to
keep, when to save and where to go on is the managers' business.
"""
