"""Hugging Face's Trainer and LlamaForCausalLM, one device."""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from workload import Recorder, Workload, read_workload, windows


class Windows(IterableDataset):
    def __init__(self, workload: Workload):
        self.workload = workload

    def __iter__(self):
        for window in windows(self.workload):
            for row in torch.from_numpy(window[:, :-1]):  # the model shifts its labels itself
                yield {"input_ids": row, "labels": row}


class Record(TrainerCallback):
    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def on_step_end(self, *arguments, **options):
        self.recorder.step_done()

    def on_log(self, args, state, control, logs=None, **options):
        if logs and "loss" in logs:
            self.recorder.losses.append(float(logs["loss"]))


def main() -> None:
    workload = read_workload()
    shape = workload.model
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=workload.sequence_length,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        tie_word_embeddings=shape.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    recorder = Recorder(sum(parameter.numel() for parameter in model.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=workload.micro_batch_size,
            max_steps=workload.num_steps,
            learning_rate=workload.learning_rate,
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=workload.max_grad_norm,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            logging_steps=workload.log_interval,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=workload.param_dtype == "bfloat16",
            torch_compile=workload.compile,
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(model=model, args=arguments, train_dataset=Windows(workload), callbacks=[Record(recorder)]).train()
    recorder.write()


if __name__ == "__main__":
    main()
