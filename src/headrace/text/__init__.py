"""Documents become tokens, tokens become blocks.

tokenizer        text → flat int32 ids; any tokenizer.json, or bytes
named_tokenizer  the tokenizer.json of a path, of a name in the Hugging Face cache, or of a tokenizer object
tokenizer_file   checks of a tokenizer.json before native code sees it
tiktoken_ranks   a .tiktoken vocabulary as a tokenizer.json
pieces           encoding of very long documents in pieces
engines          the libraries that encode, and the proof that they agree with the reference
named_encode     encoding whose result is checked, and whose errors name the document
pack             documents → blocks of seq_len tokens; a pure function of the token counts
block_layout     the compiled loops of pack
shards           prepared tokens on disk: shards, packed index, manifest
"""

from headrace.text.engines import ENGINES, SPOT_CHECK_EVERY, Encode, EngineChoice, EngineName
from headrace.text.named_encode import encode_named
from headrace.text.named_tokenizer import definition_of
from headrace.text.pack import PACK_KERNELS, Blocks, Packed, Packing, pack
from headrace.text.pieces import LONGEST_PIECE
from headrace.text.token_batch import TokenBatch, join_batches
from headrace.text.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

__all__ = [
    "ENGINES",
    "LONGEST_PIECE",
    "PACK_KERNELS",
    "SPOT_CHECK_EVERY",
    "Blocks",
    "BpeTokenizer",
    "ByteTokenizer",
    "Encode",
    "EngineChoice",
    "EngineName",
    "Packed",
    "Packing",
    "TokenBatch",
    "Tokenizer",
    "definition_of",
    "encode_named",
    "join_batches",
    "load_tokenizer",
    "pack",
    "train_bpe",
]
