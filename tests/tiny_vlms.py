"""Random vision-language models of several families, as a site has them in folders, with the published ones' marks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from batches import noise, rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fedtar_flare.imaging.batch import ImageBatch, PriorBatch
from fedtar_flare.models.config import ModelConfig, preset
from fedtar_flare.models.vlm import TINY

WIDTH, SIZE = 32, 28  # of hidden states; of images, which give four tokens each
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


def template(turn: str, image: str, end: str, assistant: str = "assistant") -> str:
    """A chat template that writes ``turn`` with a role, ``image`` for each image, and ``end`` after a message."""
    role = f"{{{{ '{assistant}' if m.role == 'assistant' else m.role }}}}"
    contents = f"{{% for c in m.content %}}{{% if c.type == 'image' %}}{image}{{% else %}}{{{{ c.text }}}}{{% endif %}}"
    asked = f"{{% if add_generation_prompt %}}{turn.replace('ROLE', assistant)}{{% endif %}}"
    return f"{{% for m in messages %}}{turn.replace('ROLE', role)}{contents}{{% endfor %}}{end}{{% endfor %}}{asked}"


def tokenizer_of(special: dict[str, str], marks: list[str], words: list[str] | None = None, **named: Any) -> Any:
    """``marks`` are special, but only those of ``special`` and ``named`` are registered as such; ``words`` are not."""
    text = Tokenizer(models.BPE())
    text.pre_tokenizer, text.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    firsts, letters = [*special.values()][:3], sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = {"special_tokens": firsts, "initial_alphabet": letters, "min_frequency": 2, "show_progress": False}
    text.train_from_iterator(["There is no pleural effusion."] * 2, trainers.BpeTrainer(vocab_size=300, **kept))
    text.add_special_tokens([transformers.AddedToken(mark, special=True, normalized=False) for mark in marks])
    text.add_tokens([transformers.AddedToken(word, special=False, normalized=False) for word in words or ()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=text, **special, **named)


def write_qwen(folder: Path) -> Path:
    """A Qwen2-VL: the shipped configuration and processor."""
    _saved(transformers.AutoConfig.from_pretrained(TINY), folder)
    return Path(shutil.copytree(TINY, folder, dirs_exist_ok=True))


def write_gemma(folder: Path, width: int = WIDTH) -> Path:
    """A Gemma 3, whose turns end with a mark that is not the tokenizer's end token."""
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    turns = ["<start_of_turn>", "<end_of_turn>"]
    tokenizer = tokenizer_of(ends, [*GEMMA.values(), *turns], ["[multimodal]"], extra_special_tokens=GEMMA)
    chat = "{{ bos_token }}" + template("<start_of_turn>ROLE\n", "<start_of_image>", "<end_of_turn>\n", "model")
    pixels = transformers.Gemma3ImageProcessor(size={"height": SIZE, "width": SIZE})
    transformers.Gemma3Processor(pixels, tokenizer, chat, image_seq_length=4).save_pretrained(folder)
    names = ("boi_token_index", "eoi_token_index", "image_token_index")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(GEMMA.values())), strict=True))
    text = _sizes(width) | {"vocab_size": len(tokenizer), "head_dim": width // 4}
    parts = {"text_config": text, "vision_config": _vision(width)}
    config = transformers.Gemma3Config(mm_tokens_per_image=4, image_token_id=ids[names[2]], **parts, **ids)
    return _saved(config, folder, tokenizer, "<eos>", "<end_of_turn>")


def write_paligemma(folder: Path) -> Path:
    """A PaliGemma, whose processor makes labels and token types of its own; its template is a user's."""
    tokenizer = tokenizer_of({"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, ["<image>"])
    pixels = transformers.SiglipImageProcessor(size={"height": SIZE, "width": SIZE})
    pixels.image_seq_length = 16
    transformers.PaliGemmaProcessor(pixels, tokenizer, template("", "<image>", "")).save_pretrained(folder)
    text = _sizes() | {"vocab_size": len(tokenizer), "head_dim": 8, "model_type": "gemma", "num_key_value_heads": 1}
    vision = _vision() | {"model_type": "siglip_vision_model", "projection_dim": WIDTH, "vision_use_head": False}
    image = tokenizer.convert_tokens_to_ids("<image>")
    sizes = {"projection_dim": WIDTH, "hidden_size": WIDTH, "vocab_size": len(tokenizer), "image_token_index": image}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, **sizes)
    return _saved(config, folder, tokenizer, "<eos>")


def write_mllama(folder: Path) -> Path:
    """A Llama 3.2 Vision, which reads images by cross-attention, and most of whose marks are not registered."""
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    others = ["<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]
    tokenizer = tokenizer_of(ends, [*others, "<|image|>"])
    turn = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
    chat = "{{ bos_token }}" + template(turn, "<|image|>", "<|eot_id|>")
    pixels = transformers.MllamaImageProcessor(size={"height": SIZE, "width": SIZE}, max_image_tiles=2)
    transformers.MllamaProcessor(pixels, tokenizer, chat).save_pretrained(folder)
    marks = dict(zip(("bos", "eos", "pad"), tokenizer.convert_tokens_to_ids(list(ends.values())), strict=True))
    ids = {f"{name}_token_id": i for name, i in marks.items()}
    image = tokenizer.convert_tokens_to_ids("<|image|>")  # published ones have it after the vocabulary of the output
    text = _sizes() | ids | {"vocab_size": image, "cross_attention_layers": [1], "rope_parameters": None}
    vision = {
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 4, "image_size": SIZE, "patch_size": 14, "max_num_tiles": 2, "vision_output_dim": 2 * WIDTH,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }  # fmt: skip
    config = transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=image)
    return _saved(config, folder, tokenizer, *others[:2], "<|eot_id|>")


def write_llava(folder: Path, **processing: Any) -> Path:
    """A LLaVA 1.5, whose template has no end mark."""
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = tokenizer_of(ends, ["<unk>", "<image>"])
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    sizes = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    chat = template("ROLE: ", "<image>\n", " ", "ASSISTANT").rstrip()
    transformers.LlavaProcessor(pixels, tokenizer, chat_template=chat, **sizes | processing).save_pretrained(folder)
    text = _sizes() | {"vocab_size": len(tokenizer), "model_type": "llama"}
    vision = _vision() | {"patch_size": 14, "model_type": "clip_vision_model"}
    parts = {"text_config": text, "vision_config": vision, "vision_feature_layer": -1}
    config = transformers.LlavaConfig(image_token_index=tokenizer.convert_tokens_to_ids("<image>"), **parts)
    return _saved(config, folder, tokenizer, "</s>")


def _sizes(width: int = WIDTH) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    return sizes | {"num_key_value_heads": 2, "initializer_range": 0.1}


def _vision(width: int = WIDTH) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    return sizes | {"image_size": SIZE, "patch_size": 7}


def _saved(config: Any, folder: Path, tokenizer: Any = None, *ends: str) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        for name, value in model.named_parameters():
            # of zeros, a Gemma or a Llama would see nothing
            if name.endswith(("mm_input_projection_weight", "_attn_gate", "_mlp_gate")):
                torch.nn.init.normal_(value, std=0.1 if value.dim() > 1 else 1.0)
        model.save_pretrained(folder)
    if tokenizer is not None:
        named = {"eos_token_id": tokenizer.convert_tokens_to_ids(list(ends))}
        (folder / "generation_config.json").write_text(json.dumps(named))
    return folder


FAMILIES: dict[str, Callable[[Path], Path]] = {"qwen": write_qwen, "gemma": write_gemma}
MORE_FAMILIES = FAMILIES | {"paligemma": write_paligemma, "mllama": write_mllama, "llava": write_llava}


def vlm_config(folder: Path, **settings: Any) -> ModelConfig:
    """Of a model in a folder."""
    own = {"decoder_name": str(folder), "weights": None, "max_length": 24, "slice_view": "slices"}
    return preset("vlm-tiny", **(own | settings))


REPORTS = ["No pleural effusion.", "There is a nodule <eos> in the left lung.", "Stable."]


def batch(*at: int, prior: str = "An <|im_end|> effusion <start_of_image>.") -> ImageBatch:
    """Three visits, of 2, 1 and 2 slices; the first shows image and report of the visit before, the last a report."""
    made, before = (noise(3, there=there, slices=2, seed=sum(there)) for there in ((2, 1, 2), (1, 0, 0)))
    days, reports, at = torch.tensor([90.0, 0.0, 3.4]), (prior, None, "Clear."), at or (0, 1, 2)
    made = rows(made, list(at))
    images = rows(before, list(at)) if 0 in at else None
    made.prior = PriorBatch(days[list(at)], images, reports=tuple(reports[i] for i in at))
    return made
