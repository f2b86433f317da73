"""Report generator, tokenizer and presets; knows nothing of federation. Start at :mod:`fedtar_flare.models.config`."""
