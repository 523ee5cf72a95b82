"""Batches leave for the trainer.

dataset   sources, deal, mix, tokenizer and packer wired together; holds no position
windows   what the documents from a given row on look like as blocks (pure)
pool      windows made ahead of need, by threads
processes the same by worker processes
lanes     what a lane delivers next, and where it stands
batch_fill  blocks become the tensors of a batch: one compiled kernel for packed text and prepared blocks
pipeline  samples become batches, ahead of need
loader    batches delivered, and what is saved
rank_loader  what every loader tells about what it delivered
state     what is saved; states of several ranks put together
weight_text  how weights are written where an order is named
ends      the step at which all ranks end
exchange  what ranks tell each other
report    what the loader did
prepared  blocks from token shards: block i without the ones before it
shard_gather  blocks of a token shard copied into the rows of a batch
prepared_loader  batches of them; one integer of state
schedule  which source sample g comes from (pure)
streams          files of cells become mixed batches (StreamMixingDataset); imports torch, so only on request
stream_metrics   what a pool's numbers tell, and how ranks combine them
data_stats       how much of which modality was learned from
extra_metrics    the one place where a trainer asks the data what it has to say
torch_adapters   the same batches in torch's DataLoader and the Hugging Face Trainer; imports torch, so only on request
"""

from headrace.loader.dataset import MixChange, TextDataset
from headrace.loader.lanes import LanePlan
from headrace.loader.loader import Loader
from headrace.loader.prepared import PreparedDataset
from headrace.loader.prepared_loader import PreparedLoader
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
