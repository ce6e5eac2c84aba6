"""Two processes that train one swapped model: their gradients are those of one with all rows.

``python transformers_process.py FILE SEED``; says what is wrong and fails.
"""

import copy
import os
import sys

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, logging

from lastlayer.integrations.transformers import head_of, swap_head

N, ROWS, LENGTH = 101, 4, 8
CONFIG = {
    "vocab_size": N, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def wrapped(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    if kind == "sharded output layer":
        fully_shard(model.lm_head)
    return fully_shard(model)


def compare(rank, name, kind):
    one = swap_head(LlamaForCausalLM(LlamaConfig(**CONFIG)), name)
    model = copy.deepcopy(one)
    ids = torch.randint(3, N, (ROWS, LENGTH))
    n_items = torch.tensor(ROWS * (LENGTH - 1))
    one(input_ids=ids, labels=ids, num_items_in_batch=n_items).loss.backward()
    mine = ids[rank * ROWS // 2 :][: ROWS // 2]
    whole = wrapped(model, kind)
    # Both wrappers take the mean over processes, as Trainer knows.
    (2 * whole(input_ids=mine, labels=mine, num_items_in_batch=n_items).loss).backward()
    for (key, found), wanted in zip(model.named_parameters(), one.parameters(), strict=True):
        gradient = found.grad if kind == "ddp" else found.grad.full_tensor()
        torch.testing.assert_close(gradient, wanted.grad, atol=1e-6, rtol=1e-4, msg=key)
    assert type(head_of(whole)) is type(head_of(one))
    if kind != "ddp":
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert rank > 0 or state.keys() == one.state_dict().keys()


def work(rank, file, seed):
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(seed)
    for name in ("full", "entmax"):
        for kind in ("ddp", "sharded", "sharded output layer"):
            compare(rank, name, kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(work, (sys.argv[1], int(sys.argv[2])), nprocs=2)
