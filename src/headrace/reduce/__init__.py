"""Many nodes, same bits: Gram matrices of more rows than fit anywhere.

    rows ──► chunks ──► chunk Grams, on any node, thread or processor ──► one fixed tree ──► covariance, PCA, ridge
             [j·c, …)    fused multiply-adds, base 128                     keyed by chunk index, never by arrival

    partition     which rows form a chunk, and who computes it
    kernel        the Gram of one chunk (tiles: its compiled loops)
    tree          in which order chunk Grams are added
    worker        one rank: which rows next, and what is shipped for them
    partial       what crosses the wire
    coordinator   what arrived, what is missing, and the one sum
    assembler     row batches of any size, re-cut into chunks
    checkpoints   two generations of saved state
    columns       which columns are multiplied: rows, targets, a one; shifted, weighted
    result        covariance, correlation, PCA, whitening, ridge
    stream        one process, rows in hand
    hooks         the activations of a module, while a model runs
    shards        rows at rest: npy, safetensors, parquet
    orders        what a worker needs to know
    transports/   the seam to a transport and the loop that asks (transport.py); processes, gloo, Ray, a folder

G = Σ xₙ xₙᵀ depends on the rows and on (n_rows, chunk_size) alone: not on nodes, threads, processors, arrival or crashes. The
core does no networking; `headrace.reduce.reduce_shards` wires it to shards and engines.
"""

from headrace.reduce.assembler import ChunkAssembler
from headrace.reduce.checkpoints import CheckpointFiles
from headrace.reduce.columns import Columns, RowBatch
from headrace.reduce.coordinator import CrossNodeCheckpoint, CrossNodeGramReduction, Receipt
from headrace.reduce.hooks import activations
from headrace.reduce.kernel import chunk_gram, chunk_gram_packed, unpack_upper
from headrace.reduce.partial import NodePartial
from headrace.reduce.partition import CROSS_CHUNK_BASE, CrossNodePartition, Provenance, default_chunk_size
from headrace.reduce.result import GramResult, Pca, Ridge
from headrace.reduce.stream import GramStream, gram
from headrace.reduce.tree import BorderState, StreamingBorderGram, pairwise_sum
from headrace.reduce.worker import NodeWorker, NodeWorkerCheckpoint

__all__ = [
    "CROSS_CHUNK_BASE",
    "BorderState",
    "CheckpointFiles",
    "ChunkAssembler",
    "Columns",
    "CrossNodeCheckpoint",
    "CrossNodeGramReduction",
    "CrossNodePartition",
    "GramResult",
    "GramStream",
    "NodePartial",
    "NodeWorker",
    "NodeWorkerCheckpoint",
    "Pca",
    "Provenance",
    "Receipt",
    "Ridge",
    "RowBatch",
    "StreamingBorderGram",
    "activations",
    "chunk_gram",
    "chunk_gram_packed",
    "default_chunk_size",
    "gram",
    "pairwise_sum",
    "unpack_upper",
]
