"""Documents become tokens, tokens become blocks.

tokenizer  text → flat int32 ids; any tokenizer.json, or bytes
pack       documents → blocks of seq_len tokens with their pieces; pure in the token counts
kernels    the compiled loops behind pack; imported only through it
"""

from headrace.text.pack import Blocks, Packed, Packing, expand_block, kernels, pack, warm_kernels
from headrace.text.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    TokenBatch,
    Tokenizer,
    join_batches,
    load_tokenizer,
    train_bpe,
)

__all__ = [
    "Blocks",
    "BpeTokenizer",
    "ByteTokenizer",
    "Packed",
    "Packing",
    "TokenBatch",
    "Tokenizer",
    "expand_block",
    "join_batches",
    "kernels",
    "load_tokenizer",
    "pack",
    "train_bpe",
    "warm_kernels",
]
