"""Report generator: slice-wise image encoder, slice pooling, GPT-2 decoder with cross-attention; tokenizer and presets.

Knows nothing of federation. Start at :mod:`fedtar_flare.models.config`.
"""
