"""Batches leave for the trainer.

dataset   sources, deal, mix, tokenizer and packer wired together; holds no position
windows   what the documents from a given row on look like as blocks (pure)
pool      windows made ahead of need, by threads
lanes     what a lane delivers next, and where it stands
loader    batches, prefetch, state
state     what is saved; states of several ranks put together
ends      the step at which all ranks end
exchange  what ranks tell each other
report    what the loader did
"""

from headrace.loader.dataset import TextDataset
from headrace.loader.lanes import LanePlan
from headrace.loader.loader import Loader
from headrace.loader.report import LoaderReport
from headrace.loader.state import merge_states
from headrace.loader.windows import Piece

__all__ = ["LanePlan", "Loader", "LoaderReport", "Piece", "TextDataset", "merge_states"]
