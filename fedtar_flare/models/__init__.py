"""Report generator (slice encoder, slice pooling, GPT-2 decoder), tokenizer and presets; knows nothing of federation.

Start at :mod:`fedtar_flare.models.config`.
"""
