"""What is derived from the sums, against numpy on the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.files import open_container, write_container
from headrace.reduce import GramResult, GramStream, StreamingBorderGram, gram

RNG = np.random.default_rng(4)
X = RNG.standard_normal((1000, 6)) @ RNG.standard_normal((6, 6)) + 3.0
Y = X[:, :2] * 2 + RNG.standard_normal((1000, 2))
W = RNG.random(1000)


def test_sums_count_and_mean_are_those_of_the_rows():
    result = gram(X, targets=Y, chunk_size=128)
    assert result.count == result.n_rows == 1000
    np.testing.assert_allclose(result.gram, X.T @ X, rtol=1e-13)
    np.testing.assert_allclose(result.sums, X.sum(0), rtol=1e-13)
    np.testing.assert_allclose(result.cross, X.T @ Y, rtol=1e-13)
    np.testing.assert_allclose(result.mean, X.mean(0), rtol=1e-13)
    assert (result.gram == result.gram.T).all()


def test_covariance_and_correlation_are_numpys():
    result = gram(X)
    np.testing.assert_allclose(result.covariance(), np.cov(X.T), rtol=1e-11)
    np.testing.assert_allclose(result.correlation(), np.corrcoef(X.T), rtol=1e-11)
    constant = gram(np.ones((9, 2))).correlation()
    assert np.isnan(constant).all()


def test_weights_count_as_repeated_rows_do():
    times = RNG.integers(0, 4, 1000)
    weighted, repeated = gram(X, weights=times), gram(np.repeat(X, times, axis=0))
    np.testing.assert_allclose(weighted.gram, repeated.gram, rtol=1e-12)
    np.testing.assert_allclose(weighted.covariance(), repeated.covariance(), rtol=1e-11)
    assert weighted.count == pytest.approx(repeated.count)


def test_a_shift_keeps_the_digits_that_a_large_mean_costs():
    far = X + 1e7
    exact = np.cov(X.T)
    plain, shifted = gram(far), gram(far, shift=far[0])
    np.testing.assert_allclose(shifted.covariance(), exact, rtol=1e-7)
    np.testing.assert_allclose(shifted.mean, far.mean(0), rtol=1e-12)
    assert np.abs(shifted.covariance() - exact).max() < np.abs(plain.covariance() - exact).max() / 100


def test_components_are_orthonormal_ordered_and_have_fixed_signs():
    pca = gram(X).pca(4)
    np.testing.assert_allclose(pca.components @ pca.components.T, np.eye(4), atol=1e-12)
    assert (np.diff(pca.variance) <= 0).all()
    rows = np.arange(4)
    assert (pca.components[rows, np.abs(pca.components).argmax(1)] > 0).all()
    np.testing.assert_allclose(np.cov(pca.transform(X).T), np.diag(pca.variance), atol=1e-9)
    flipped = gram(-X).pca(4)
    np.testing.assert_allclose(flipped.components, pca.components, atol=1e-9)


@pytest.mark.parametrize("kind", ["zca", "pca"])
def test_whitened_rows_have_the_identity_as_covariance(kind):
    white = X @ gram(X).whitening(kind=kind).T
    np.testing.assert_allclose(np.cov(white.T), np.eye(6), atol=1e-9)


@pytest.mark.parametrize("shift", [None, X[3]])
def test_ridge_is_least_squares_with_a_free_intercept(shift):
    found = gram(X, targets=Y, weights=W, shift=shift).ridge(2.5)
    root = np.sqrt(W)[:, None]
    wide = np.concatenate([X, np.ones((1000, 1))], 1) * root
    penalty = np.diag([2.5] * 6 + [0.0])
    expected = np.linalg.solve(wide.T @ wide + penalty, wide.T @ (Y * root))
    np.testing.assert_allclose(found.weights, expected[:-1], rtol=1e-8)
    np.testing.assert_allclose(found.intercept, expected[-1], rtol=1e-8)
    assert found.predict(X).shape == Y.shape


def test_batches_of_any_size_give_the_bits_of_the_whole_array():
    whole = gram(X, targets=Y, weights=W, chunk_size=100)
    stream = GramStream(width=6, targets=2, weighted=True, chunk_size=100)
    for at in range(0, 1000, 77):
        stream.push(X[at : at + 77], Y[at : at + 77], W[at : at + 77])
    assert stream.finish().full.tobytes() == whole.full.tobytes()


def test_torch_rows_of_every_type_are_read_as_they_are_stored():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        rows = torch.tensor(X).to(dtype)
        wide = gram(rows.to(torch.float64).numpy())
        assert (
            gram(rows).about["rows"]
            == {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}[str(dtype)[6:]]
        )
        assert gram(rows).sha256 == wide.sha256


def test_a_saved_result_comes_back_and_a_changed_one_is_refused(tmp_path):
    result = gram(X, targets=Y, shift=X[0])
    path = result.save(tmp_path / "a.safetensors")
    again = GramResult.load(path)
    assert again.full.tobytes() == result.full.tobytes()
    assert again.fingerprint == result.fingerprint
    from safetensors.numpy import load_file

    assert load_file(path)["gram"].tobytes() == result.gram.tobytes()
    with pytest.raises(ConfigError, match="exists"):
        result.save(path)
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FileCorrupt, match="fails its checksum"):
        GramResult.load(path)


def test_what_cannot_be_answered_says_so():
    empty = gram(np.empty((0, 3)))
    assert empty.count == 0
    with pytest.raises(DataError, match="there are no rows"):
        empty.covariance()
    with pytest.raises(DataError, match="over 1 rows"):
        gram(np.ones((1, 3))).covariance()
    with pytest.raises(ConfigError, match="1 to 6 components, 7 were asked"):
        gram(X).pca(7)
    with pytest.raises(ConfigError, match="ridge needs targets"):
        gram(X).ridge(1.0)
    with pytest.raises(DataError, match="cannot be whitened"):
        gram(np.ones((9, 2))).whitening()
    with pytest.raises(DataError, match=r"rows 0 to 9: weights must be finite and not negative, got -1.0 at row 3"):
        gram(np.ones((9, 2)), weights=[1, 1, 1, -1, 1, 1, 1, 1, 1])
    with pytest.raises(DataError, match="rows 128 to 256: the partial of chunk 1 holds NaN"):
        gram(np.where(np.arange(300)[:, None] == 200, np.nan, 1.0), chunk_size=128)
    with pytest.raises(ConfigError, match="a shift is 2 finite numbers"):
        gram(np.ones((9, 2)), shift=[1.0])


def test_weights_of_bfloat16_count_as_their_numbers_and_complex_ones_are_refused():
    torch = pytest.importorskip("torch")
    half = torch.ones(4, 2, dtype=torch.bfloat16)
    assert gram(half, weights=torch.ones(4, dtype=torch.bfloat16)).count == 4.0
    assert gram(half, shift=torch.ones(2, dtype=torch.bfloat16)).gram.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    for what in ("weights", "targets"):
        with pytest.raises(DataError, match=rf"{what} must be real numbers, got complex128"):
            gram(np.ones((4, 2)), **{what: np.ones(4, complex)})


def test_a_sum_that_overflows_is_refused_with_its_chunks():
    with pytest.raises(DataError, match=r"the sum of chunks 0 to 1 exceeds 1.8e308"):
        gram(np.full((4, 2), 1.2e154), chunk_size=1)
    fold = StreamingBorderGram(entries=1, n_chunks=256)
    for chunk in range(255):
        fold.submit_chunk_gram(chunk, np.array([1e306]))
    with pytest.raises(DataError, match="the sum of chunks 0 to 255 exceeds"):
        fold.submit_chunk_gram(255, np.array([5e307]))
    fold = StreamingBorderGram(entries=1, n_chunks=2)
    fold.submit_chunk_gram(0, np.array([1.7e308]))
    for _ in range(2):
        with pytest.raises(DataError, match="the sum of chunks 0 to 1 exceeds"):
            fold.submit_chunk_gram(1, np.array([1.7e308]))
    with pytest.raises(DataError, match="the sum of chunks 0 to 1 exceeds"):
        fold.finish()


def test_the_fingerprint_tells_targets_apart_and_is_compared_at_load(tmp_path):
    one, other = gram(X, targets=Y), gram(X, targets=2 * Y)
    assert one.sha256 == other.sha256
    assert one.fingerprint != other.fingerprint
    path = one.save(tmp_path / "a")
    held = open_container(path)
    write_container(path, {**held.arrays, "full": other.full}, held.meta, replace=True)
    with pytest.raises(FileCorrupt, match="is no saved Gram of headrace's: its matrix is not the one it describes"):
        GramResult.load(path)


def test_a_stream_that_refused_rows_says_so_for_ever():
    stream = GramStream(width=2, chunk_size=100)
    stream.push(np.ones((50, 2)))
    with pytest.raises(DataError, match="of 2 columns are expected"):
        stream.push(np.ones((9, 3)))
    with pytest.raises(DataError, match=r"rows 0 to 100: .* NaN"):
        stream.push(np.full((60, 2), np.nan))
    for again in (lambda: stream.push(np.ones((50, 2))), stream.finish):
        with pytest.raises(DataError, match=r"rows 0 to 100: .* NaN.* begin a new stream"):
            again()


def test_columns_that_do_not_vary_or_depend_on_others_are_seen_through_the_rounding():
    x, y = RNG.standard_normal((1000, 4)), RNG.standard_normal((1000, 1))
    x[:, 2] = 0.1
    correlation = gram(x).correlation()
    assert np.isnan(correlation[2]).all()
    assert np.isfinite(np.delete(np.delete(correlation, 2, 0), 2, 1)).all()
    x[:, 2] = x[:, 0] + x[:, 1]
    for rows in (x, x + 100.0, x * [1, 1, 1, 1e-9], x[:3]):
        with pytest.raises(DataError, match="do not span all 4 columns"):
            gram(rows).whitening()
        with pytest.raises(DataError, match="do not span all columns"):
            gram(rows, targets=y[: len(rows)]).ridge(0)
        assert np.isfinite(gram(rows, targets=y[: len(rows)]).ridge(1e-3).weights).all()
    x[:, 2] = RNG.standard_normal(1000)
    for scale in (1.0, np.array([1e6, 1.0, 1.0, 1e-6])):
        expected = np.linalg.lstsq(np.c_[x, np.ones(1000)], y, rcond=None)[0][:-1]
        found = gram(x * scale, targets=y).ridge(0).weights * np.reshape(scale, (-1, 1))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigError, match="eps must be"):
            gram(x).whitening(eps=wrong)
        with pytest.raises(ConfigError, match="lam must be"):
            gram(x, targets=y).ridge(wrong)


def test_whole_numbers_of_16_bits_are_not_taken_for_bfloat16():
    whole = np.array([[1, 2], [3, 4]], np.uint16)
    with pytest.raises(DataError, match=r"rows of uint16 .*torch.bfloat16"):
        gram(whole)
    with pytest.raises(DataError, match="rows of uint16"):
        GramStream(width=2).push(whole)
    with pytest.raises(DataError, match="targets of uint16"):
        gram(np.ones((2, 2)), targets=whole)


@pytest.mark.parametrize("size", [0, -3, 1.5, True])
def test_a_chunk_has_a_whole_number_of_rows(size):
    with pytest.raises(ConfigError, match="chunk_size must be a whole number of at least 1"):
        gram(np.ones((9, 2)), chunk_size=size)


def test_a_shift_that_cannot_be_one_is_refused_by_what_is_wrong():
    for wrong, told in (
        ("abc", "got <U3"),
        ([1.0, float("nan")], "got nan for column 1"),
        ([1j, 2.0], "got complex128"),
    ):
        with pytest.raises(ConfigError, match=f"a shift is 2 finite numbers, one a column; {told}"):
            gram(np.ones((9, 2)), shift=wrong)
