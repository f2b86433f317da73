"""The paper's models without their weights: ResNet-101 and Llama-2-7B's sizes on the meta device."""

import json

from fedtar_flare.models.outline import outline
from fedtar_flare.runtime.recipe import MethodRecipe

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def test_what_travels_is_the_paper_s_59_million_values(tmp_path):
    """4.7 TB for 10 sites over 1,000 rounds both ways, as the paper's communication cost; the bank apart."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    model = {"decoder_name": str(tmp_path), "tokenizer": "small", "weights": "random"}
    executor = MethodRecipe("fedmrg", preset="fedmrg-paper", model=model).executor
    made_of = outline(executor.strategy.settings.model, executor.strategy.extend)
    factors = made_of.lora_values(executor.strategy.settings.model.lora_targets, executor.strategy.settings.lora.rank)
    whole = made_of.exchanged(executor.strategy.settings.lora.exchange)
    values = dict.fromkeys(("encoder", "projection", "diagnosis"), 0)
    for name in whole:
        values[name.partition(".")[0]] += made_of.tensors[name]
    assert factors == 2 * 32 * 16 * (4096 + 4096) == 8_388_608
    assert values == {"encoder": 42_500_160 - 9_408, "projection": 8_388_608, "diagnosis": 56 * 2049 + 4 * 4096}
    total = factors + sum(values.values())
    assert total == 59_399_096 and round(4 * total / 1e6) == 238
    assert round(2 * 10 * 1000 * 4 * total / 1e12, 1) == 4.8
    assert not [name for name in whole if name in made_of.barred], "neither pixels nor words one by one"

    layers = made_of.targeted(executor.strategy.settings.model.lora_targets)
    assert len(layers) == 64 and {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
    assert executor.strategy.settings.lora.alpha / executor.strategy.settings.lora.rank == 1.0
