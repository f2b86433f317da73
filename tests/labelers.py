"""Tiny checkpoints of the published labelers' form, for tests."""

import torch
import transformers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "effusion", "small", "heart", "."]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def published(folder, kind):
    """A checkpoint as it is published, beside its encoder's tokenizer and configuration; and its encoder and heads."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "chexbert":  # DataParallel's names under model_state_dict, in the file format of 2020
            config = transformers.BertConfig(vocab_size=len(WORDS), initializer_range=1.0, **SIZES)
            encoder, heads = transformers.BertModel(config), [torch.nn.Linear(8, 4) for _ in range(13)]
            heads.append(torch.nn.Linear(8, 2))
            state = {f"module.bert.{name}": value for name, value in encoder.state_dict().items()}
            state["module.bert.embeddings.position_ids"] = torch.arange(512)[None]
            for i, head in enumerate(heads):
                state |= {f"module.linear_heads.{i}.{name}": value for name, value in head.state_dict().items()}
            checkpoint = {"epoch": 3, "model_state_dict": state}
        else:
            more = {"max_position_embeddings": 514, "pad_token_id": 0, "initializer_range": 1.0}
            config = transformers.RobertaConfig(vocab_size=len(WORDS), **more, **SIZES)
            encoder, heads = transformers.RobertaModel(config), [torch.nn.Linear(8, 18)]
            checkpoint = {f"model.{name}": value for name, value in encoder.state_dict().items()}
            checkpoint["model.embeddings.position_ids"] = torch.arange(514)[None]
            checkpoint |= {f"classifier.{name}": value for name, value in heads[0].state_dict().items()}
    config.save_pretrained(folder)
    file = folder / f"{kind}.pth"
    torch.save(checkpoint, file, _use_new_zipfile_serialization=kind != "chexbert")
    return file, encoder.eval(), heads
