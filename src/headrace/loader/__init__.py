"""Batches leave for the trainer.

loader           the one loader: thread and prefetch, delivery, report; PreparedLoader is a name for it
loader_plan      the contract between the loader and its three plans
text_plan        packed text: samples of lanes become batches, and what is saved of them
prepared_plan    prepared blocks; one integer of state
stream_plan      files of cells; imports torch, so only on request, as do the next two
streams          StreamDataset, and StreamMixingDataset: the same with a loader in it
torch_adapters   batches of text in torch's DataLoader and the Hugging Face Trainer
report           what the loader did

Text:
dataset          sources, deal, mix, tokenizer and packer wired together; holds no position
windows          what the documents from a given row on look like as blocks (pure)
pool             windows made ahead of need, by threads
processes        the same by worker processes
lanes            what a lane delivers next, and where it stands
batch_fill       blocks become the tensors of a batch: one compiled kernel for packed text and prepared blocks
ends             the step at which all ranks end
state            what is saved of text; states of several ranks put together
weight_text      how weights are written where an order is named
exchange         the states of all ranks

Prepared blocks:
prepared         blocks from token shards: block i without the ones before it
shard_gather     blocks of a token shard copied into the rows of a batch
schedule         which source sample g comes from (pure)

Streams:
stream_metrics   metrics of a pool, how ranks combine them, and where a trainer asks for them
data_stats       how much of which modality was learned from
"""

from headrace.loader.dataset import MixChange, TextDataset
from headrace.loader.lanes import LanePlan
from headrace.loader.loader import Loader, PreparedLoader
from headrace.loader.prepared import PreparedDataset
from headrace.loader.report import LoaderReport
from headrace.loader.state import merge_states
from headrace.loader.windows import Piece

__all__ = [
    "LanePlan",
    "Loader",
    "LoaderReport",
    "MixChange",
    "Piece",
    "PreparedDataset",
    "PreparedLoader",
    "TextDataset",
    "merge_states",
]
