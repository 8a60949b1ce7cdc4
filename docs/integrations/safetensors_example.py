"""torchrun --nproc-per-node 2 safetensors_example.py s3://bucket/run: a Hugging Face export each step."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ckptfs
from ckptfs.integrations.safetensors import load_safetensors, save_safetensors

uri = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
model = fully_shard(LlamaForCausalLM(config))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ckptfs.prepare_run(uri) as run:
    newest = ckptfs.latest(uri, "directory")
    done = newest.step if newest else 0
    if newest:
        load_safetensors(model.state_dict(), newest.uri)
    if dist.get_rank() == 0:
        print("resumed", done or "none")
    for step in range(done + 1, 5):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        files = {"config.json": config.to_json_string()}
        place = f"{uri}/hf_{step}"
        save_safetensors(model.state_dict(), place, max_shard_size="30KB", files=files, run=run)
whole = b"".join(v.full_tensor().numpy().tobytes() for v in model.state_dict().values())
if dist.get_rank() == 0:
    print("final", hashlib.sha256(whole).hexdigest())
dist.destroy_process_group()
