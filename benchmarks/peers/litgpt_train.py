"""LitGPT's model in the loop of its `litgpt pretrain` (Fabric, one device), without validation and checkpoints.

That command compiles the whole model; here it does where the workload says so.
"""

from __future__ import annotations

import lightning
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from workload import Recorder, read_workload, windows


def main() -> None:
    workload = read_workload()
    shape = workload.model
    config = Config(
        block_size=workload.sequence_length,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_query_groups=shape.num_kv_heads,
        n_embd=shape.hidden_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.intermediate_size,
        rope_base=500_000,
    )
    precision = "32-true" if workload.param_dtype == "float32" else "bf16-mixed"
    fabric = lightning.Fabric(devices=1, accelerator="auto", precision=precision)
    fabric.seed_everything(0)
    with fabric.init_module():
        model = GPT(config)
    recorder = Recorder(sum(parameter.numel() for parameter in model.parameters()))
    if workload.compile:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=workload.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=fabric.device.type == "cuda",
    )
    optimizer = fabric.setup_optimizers(optimizer)

    for step, window in enumerate(windows(workload), start=1):
        tokens = fabric.to_device(torch.from_numpy(window))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = chunked_cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % workload.log_interval == 0:
            recorder.losses.append(loss.item())
        recorder.step_done()
        if step == workload.num_steps:
            break
    recorder.write()


if __name__ == "__main__":
    main()
