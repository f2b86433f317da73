"""Byte-level BPE that encodes any text without loss. Needs the small ``tokenizers`` library, not transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import MOST_BYTES, read_text

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
IGNORED = -100  # label of positions that no loss is taken at


class ReportTokenizer:
    """Encodes reports as token ids and decodes them; any text comes back, even one that spells a special token.

    A report that is cut to ``max_length`` loses its end token; a draft may end with ``ends`` too.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_length: int, *, bos_id: int, eos_id: int, pad_id: int, ends: Iterable[int] = ()
    ):
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.end_ids = frozenset([eos_id, *ends])

    @classmethod
    def load(cls, path: Path, max_length: int) -> ReportTokenizer:
        """Load a ``tokenizer.json`` of byte-level BPE with the three special tokens."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(read_text(path, MOST_BYTES))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is no readable tokenizer.json: {error}") from error
        known = tokenizer.get_vocab()
        if missing := [token for token in (BOS, EOS, PAD) if token not in known]:
            raise ConfigError(f"{path} lacks the special token {missing[0]}: add it, or take 'small' or 'decoder'")
        return cls(tokenizer, max_length, bos_id=known[BOS], eos_id=known[EOS], pad_id=known[PAD])

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Encode a report as ``[bos, ..., eos]``, cut to ``max_length``."""
        clean = text.encode("utf-8", "replace").decode("utf-8")
        body = self._tokenizer.encode(clean, add_special_tokens=False).ids
        return [self.bos_id, *body, self.eos_id][: self.max_length]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the tokens after the leading begin token and before the first end token."""
        body = ids[1:] if ids and ids[0] == self.bos_id else ids
        words = [i for i in takewhile(lambda i: i not in self.end_ids, body) if i not in (self.bos_id, self.pad_id)]
        return str(self._tokenizer.decode(words, skip_special_tokens=False))

    def batch(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode reports as ids and unshifted labels (B, L), int64, padded on the right, with -100 in the labels."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [torch.tensor(self.encode(text)) for text in texts]
        input_ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED)
        return input_ids, labels
