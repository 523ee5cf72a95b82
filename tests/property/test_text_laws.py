"""Packing loses no token, invents none, and is a pure function of its window."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import TokenizerError
from headrace.loader.batch_fill import DOCUMENTS, FILL_KERNELS, PIECES, REAL, TOKEN_FIELDS, BatchFill
from headrace.order import content_hash
from headrace.runtime.compiled import wait_for_kernels
from headrace.text import PACK_KERNELS, Blocks, ByteTokenizer, Packing, TokenBatch, encode_named, join_batches, pack

wait_for_kernels(*PACK_KERNELS, *FILL_KERNELS)

lengths = st.lists(st.integers(0, 70), max_size=40)


def batch_of(sizes: list[int]) -> TokenBatch:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])
    return TokenBatch(np.arange(1000, 1000 + offsets[-1], dtype=np.int32), offsets)


def expand_block(blocks: Blocks, b: int, pad_id: int, unshifted: bool, ids, labels, positions, segments) -> list[int]:
    """A block as the batch contract has it, piece by piece: what the batch fill must equal. Returns where its pieces end."""
    ids[:], labels[:], segments[:] = pad_id, -100, 0
    column, ends = 0, []
    for number, p in enumerate(range(blocks.piece_ptr[b], blocks.piece_ptr[b + 1]), 1):
        n = int(blocks.piece_len[p])
        tokens = blocks.tokens[b, column : column + n]
        ids[column : column + n] = tokens
        positions[column : column + n] = np.arange(n)
        segments[column : column + n] = number
        labels[column : column + n] = [-100, *tokens[1:]] if unshifted else [*tokens[1:], blocks.piece_next[p]]
        column += n
        ends.append(column)
    positions[column:] = np.arange(len(ids) - column)
    return ends if column == len(ids) else [*ends, len(ids)]


def filled(blocks: Blocks, order: list[int], packing: Packing, unshifted: bool) -> dict[str, np.ndarray]:
    """The batch of some blocks; -1 is a row without tokens."""
    fill = BatchFill(
        packing.seq_len, (*TOKEN_FIELDS, "cu_seqlens", "row_count"), pad=packing.pad_id, unshifted=unshifted
    )
    rows = fill.rows(len(order))
    for r, b in enumerate(order):
        pieces = slice(int(blocks.piece_ptr[b]), int(blocks.piece_ptr[b + 1])) if b >= 0 else slice(0, 0)
        count = pieces.stop - pieces.start
        rows.tokens[r] = blocks.tokens[b] if b >= 0 else 10**6
        rows.lengths[r, :count] = blocks.piece_len[pieces]
        rows.following[r, :count] = blocks.piece_next[pieces]
        rows.facts[r, [REAL, PIECES, DOCUMENTS]] = (blocks.real[b], count, blocks.row_count[b]) if b >= 0 else (0, 0, 0)
    return fill.batch(rows, range(7, 7 + 3 * len(order), 3))


def delivered(batch: TokenBatch, packing: Packing, *, shuffle_key: int | None = 3, unshifted: bool = False):
    """Pack all documents window by window; the pieces of each document with ids, labels and positions."""
    at = offset = 0
    documents: dict[int, dict[int, tuple[list[int], list[int], list[int]]]] = {}
    rows = blocks_made = 0
    while at < len(batch):
        packed = pack([batch.documents(at)], packing, offset=offset, last=True, shuffle_key=shuffle_key)
        for b in range(len(packed.blocks)):
            ids, labels, positions, segments = (np.empty(packing.seq_len, np.int64) for _ in range(4))
            expand_block(packed.blocks, b, packing.pad_id, unshifted, ids, labels, positions, segments)
            column = 0
            for p in range(packed.blocks.piece_ptr[b], packed.blocks.piece_ptr[b + 1]):
                n = int(packed.blocks.piece_len[p])
                part = slice(column, column + n)
                doc = at + int(packed.blocks.piece_doc[p])
                documents.setdefault(doc, {})[int(packed.blocks.piece_start[p])] = (
                    ids[part].tolist(), labels[part].tolist(), positions[part].tolist(),
                )  # fmt: skip
                column += n
            assert column == packed.blocks.real[b] > 0
            assert (ids[column:] == packing.pad_id).all()
            assert (labels[column:] == -100).all()
            rows += int(packed.blocks.row_count[b])
            blocks_made += 1
        assert packed.documents > 0 or packed.offset > offset, "a window must move on"
        at, offset = at + packed.documents, packed.offset
    return documents, rows, blocks_made


@given(
    sizes=lengths, seq_len=st.integers(2, 33), blocks=st.integers(1, 5), strategy=st.sampled_from(["best_fit", "concat"]),
    bos=st.sampled_from([None, 7]), eos=st.sampled_from([None, 8]),
)  # fmt: skip
def test_every_document_arrives_whole_with_the_right_labels(sizes, seq_len, blocks, strategy, bos, eos):
    batch = batch_of(sizes)
    packing = Packing(seq_len=seq_len, strategy=strategy, blocks=blocks, bos_id=bos, eos_id=eos, pad_id=9)
    documents, rows, _ = delivered(batch, packing)
    assert rows == sum(1 for n in sizes if n), "row_count sums to the documents with text"
    for d, size in enumerate(sizes):
        if not size:
            assert d not in documents
            continue
        own = batch.ids[batch.offsets[d] : batch.offsets[d + 1]].tolist()
        want = ([bos] if bos is not None else []) + own + ([eos] if eos is not None else [])
        pieces = [documents[d][start] for start in sorted(documents[d])]
        assert [t for ids, _, _ in pieces for t in ids] == want
        assert [t for _, labels, _ in pieces for t in labels] == [*want[1:], -100]
        assert all(positions == list(range(len(ids))) for ids, _, positions in pieces)
        if strategy == "best_fit" and len(want) <= seq_len:
            assert len(pieces) == 1, "only documents longer than a block are cut"


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30), seq_len=st.integers(4, 20))
def test_unshifted_labels_never_cross_a_piece(sizes, seq_len):
    packing = Packing(seq_len=seq_len, blocks=3, eos_id=8, pad_id=9)
    documents, _, _ = delivered(batch_of(sizes), packing, unshifted=True)
    for pieces in documents.values():
        for ids, labels, _ in pieces.values():
            assert labels == [-100, *ids[1:]]


@given(sizes=lengths, seq_len=st.integers(2, 20), key=st.integers(0, 2**32))
def test_packing_is_a_pure_function_of_its_documents(sizes, seq_len, key):
    packing = Packing(seq_len=seq_len, blocks=3, eos_id=8)
    first, second = (pack([batch_of(sizes)], packing, last=True, shuffle_key=key) for _ in range(2))
    assert np.array_equal(first.blocks.hashes, second.blocks.hashes)
    assert np.array_equal(first.blocks.tokens, second.blocks.tokens)


@given(
    sizes=lengths, cuts=st.lists(st.integers(0, 40), max_size=4), strategy=st.sampled_from(["best_fit", "concat"]), data=st.data(),
)  # fmt: skip
def test_documents_in_several_batches_pack_like_one(sizes, cuts, strategy, data):
    packing = Packing(seq_len=16, blocks=3, eos_id=8, strategy=strategy)
    offset = data.draw(st.integers(0, sizes[0])) if strategy == "concat" and sizes and sizes[0] else 0
    whole = batch_of(sizes)
    places = [0, *sorted(min(cut, len(sizes)) for cut in cuts), len(sizes)]
    parts = [whole.documents(a, b) for a, b in itertools.pairwise(places)]
    one, several = (pack(batches, packing, offset=offset, last=True, shuffle_key=2) for batches in ([whole], parts))
    assert one[1:] == several[1:]
    for field in dataclasses.fields(Blocks):
        assert np.array_equal(getattr(one.blocks, field.name), getattr(several.blocks, field.name)), field.name
    assert np.array_equal(join_batches(parts).ids, whole.ids)
    assert np.array_equal(join_batches(parts).offsets, whole.offsets)


@given(sizes=lengths, at=st.integers(0, 10**6), wrong=st.sampled_from([-1, -(2**31), 5000, 2**31 - 1]))
def test_an_id_outside_the_vocabulary_is_named_with_its_document(sizes, at, wrong):
    batch = batch_of(sizes)
    tokenizer: Any = SimpleNamespace(name="own", vocab_size=5000, encode=lambda texts: batch)

    def encoded() -> TokenBatch:
        return encode_named(tokenizer, [""] * len(sizes), "document {}".format)

    assert encoded() is batch
    if len(batch.ids):
        at %= len(batch.ids)
        batch.ids[at] = wrong
        document = int(np.searchsorted(batch.offsets, at, side="right")) - 1
        with pytest.raises(TokenizerError, match=f"gave id {wrong} for document {document}, outside"):
            encoded()


@given(sizes=st.lists(st.integers(1, 16), min_size=4, max_size=60))
def test_a_longer_look_ahead_does_not_change_a_window(sizes):
    packing = Packing(seq_len=16, blocks=2, eos_id=None)
    whole = pack([batch_of(sizes)], packing, last=True, shuffle_key=1)
    if whole.documents == len(sizes):
        return
    for extra in range(whole.documents + 1, len(sizes) + 1):
        if sum(sizes[:extra]) <= packing.budget:
            continue  # a window must look past its budget to know that it is full
        part = pack([batch_of(sizes[:extra])], packing, last=False, shuffle_key=1)
        assert part.documents == whole.documents
        assert np.array_equal(part.blocks.hashes, whole.blocks.hashes)


@given(seed=st.integers(0, 2**32), count=st.integers(600, 900))
@settings(max_examples=20)
def test_best_fit_pads_little_where_documents_are_short_beside_a_block(seed, count):
    # Of documents a little over half a block nobody can pack two into one: padding is then a third.
    sizes = np.random.default_rng(seed).integers(1, 101, count).tolist()
    documents, _, blocks = delivered(batch_of(sizes), Packing(seq_len=512, blocks=32, pad_id=0))
    real = sum(len(ids) for pieces in documents.values() for ids, _, _ in pieces.values())
    windows = blocks // 32 + 1
    assert blocks * 512 - real <= 0.02 * real + windows * 512


@given(
    sizes=lengths, parts=st.integers(1, 3), seq_len=st.integers(2, 200), blocks=st.integers(1, 5), strategy=st.sampled_from(["best_fit", "concat"]),
    bos=st.sampled_from([None, 7]), eos=st.sampled_from([None, 8]), last=st.booleans(), key=st.sampled_from([None, 3]),
)  # fmt: skip
def test_compiled_packing_is_plain_packing(interpreted, sizes, parts, seq_len, blocks, strategy, bos, eos, last, key):
    whole = batch_of(sizes)
    borders = np.linspace(0, len(sizes), parts + 1).astype(int).tolist()
    batches = [whole.documents(a, b) for a, b in itertools.pairwise(borders)]
    packing = Packing(seq_len=seq_len, strategy=strategy, blocks=blocks, bos_id=bos, eos_id=eos, pad_id=9)
    fast = pack(batches, packing, last=last, shuffle_key=key)
    with interpreted(*PACK_KERNELS):
        slow = pack(batches, packing, last=last, shuffle_key=key)
    assert fast[1:] == slow[1:]
    for name in Blocks.__slots__:
        assert np.array_equal(getattr(fast.blocks, name), getattr(slow.blocks, name)), name
    blocks_ = fast.blocks
    for b, (begin, end) in enumerate(itertools.pairwise(blocks_.piece_ptr.tolist())):
        own = content_hash(
            blocks_.tokens[b, : blocks_.real[b]], blocks_.piece_len[begin:end], blocks_.piece_next[begin:end]
        )
        assert blocks_.hashes[b].tobytes() == own


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), seq_len=st.integers(2, 33), strategy=st.sampled_from(["best_fit", "concat"]),
    unshifted=st.booleans(), compiled=st.booleans(), data=st.data(),
)  # fmt: skip
def test_a_batch_is_its_blocks_piece_by_piece(interpreted, sizes, seq_len, strategy, unshifted, compiled, data):
    packing = Packing(seq_len=seq_len, strategy=strategy, blocks=8, eos_id=8, pad_id=9)
    blocks = pack([batch_of(sizes)], packing, last=True, shuffle_key=2).blocks
    order = data.draw(st.lists(st.integers(-1, len(blocks) - 1), min_size=1, max_size=6))
    if compiled:
        batch = filled(blocks, order, packing, unshifted)
    else:
        with interpreted(*FILL_KERNELS):
            batch = filled(blocks, order, packing, unshifted)
    borders = [0]
    for r, b in enumerate(order):
        ids, labels, segments = (np.full(seq_len, fill) for fill in (9, -100, 0))
        positions, ends = np.arange(seq_len), [seq_len]
        if b >= 0:
            ends = expand_block(blocks, b, 9, unshifted, ids, labels, positions, segments)
        for name, expected in zip(TOKEN_FIELDS, (ids, labels, positions, segments), strict=True):
            assert batch[name][r].tolist() == expected.tolist(), name
        borders += [r * seq_len + end for end in ends]
    assert batch["cu_seqlens"].tolist() == borders
    assert batch["max_seqlen"] == max(b - a for a, b in itertools.pairwise(borders))
    assert batch["row_count"].tolist() == [int(blocks.row_count[b]) if b >= 0 else 0 for b in order]
    assert batch["sample_index"].tolist() == list(range(7, 7 + 3 * len(order), 3))


@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=20))
def test_the_byte_tokenizer_gives_back_the_text(texts):
    tokenizer = ByteTokenizer()
    batch = tokenizer.encode(texts)
    assert len(batch) == len(texts)
    for d, text in enumerate(texts):
        assert tokenizer.decode(batch.ids[batch.offsets[d] : batch.offsets[d + 1]]) == text
