"""A Trainer over a model with LoRA adapters by peft: most parameters are frozen."""

import hf_common
from peft import LoraConfig, get_peft_model


def make():
    config = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(hf_common.make_model(), config)


hf_common.run(make)
