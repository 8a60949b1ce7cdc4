"""torchrun --standalone --nproc-per-node 2 transformers_example.py URI [sync|async]"""

import hashlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ckptfs.integrations.transformers import CkptfsCallback

uri, mode = (*sys.argv[1:], "sync")[:2]
scratch = os.path.join(tempfile.gettempdir(), os.environ["TORCHELASTIC_RUN_ID"])  # this node's disk
set_seed(1)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=32, num_hidden_layers=1, attention_dropout=0.1, **sizes)
args = TrainingArguments(scratch, max_steps=6, save_steps=1, use_cpu=True, report_to="none")
data = [{"input_ids": (ids := torch.randint(32, (8,))), "labels": ids} for _ in range(64)]
saves = CkptfsCallback(uri, mode=mode, keep_latest=2)
trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=data, callbacks=[saves])
checkpoint = saves.resume(args)
print(f"resumed {saves.step or 'none'}" if args.process_index == 0 else "")
trainer.train(resume_from_checkpoint=checkpoint)
optimizer, schedule = trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()
leaves = tree_leaves([trainer.model.state_dict(), optimizer, schedule, torch.get_rng_state()])
mine = [leaf.tolist() if torch.is_tensor(leaf) else leaf for leaf in leaves]
dist.all_gather_object(both := [None, None], mine)
digest = hashlib.sha256(repr(both).encode()).hexdigest()
print(f"final {digest}" if args.process_index == 0 else "")
