"""The mixture of experts and the fixed-order product against float64; in the interpreter small, on a GPU also large."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from octavo.kernels import reference
from octavo.kernels.fixed_matmul import fixed_matmul
from octavo.kernels.moe import expert_rows, route, sort_by_expert
from octavo.layers.moe import MixtureOfExperts
from octavo.model_spec import MoeSpec
from octavo.worker.cuda.mixture import mixture
from test_kernels import DEVICE, DTYPE, GPU, NAN, TOLERANCE, close, ints, normal, poisoned, weight

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # the interpreter's


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def layer(experts: int, k: int, hidden: int, inner: int, *, normalize: bool = True) -> MixtureOfExperts:
    made = MixtureOfExperts(hidden, MoeSpec(experts, k, inner, normalize, frozenset()), "silu")
    made.gate.build(DTYPE, torch.device(DEVICE))
    made.experts.build(DTYPE, torch.device(DEVICE))
    made.gate.weight.data.copy_(weight(experts, hidden) * 3)
    made.experts.gate_up_proj.data.copy_(weight(experts, 2 * inner, hidden))
    made.experts.down_proj.data.copy_(weight(experts, hidden, inner))
    return made


def expected(made: MixtureOfExperts, x: Tensor, *, fixed: bool = False) -> Tensor:
    own, scores = made.experts, functional.linear(x, made.gate.weight)
    if fixed:
        fixed_matmul(x, made.gate.weight, scores)
    return reference.mixture(x, scores, own.gate_up_proj, own.down_proj, made.k, "silu", normalize=made.normalize)


@pytest.mark.parametrize("normalize", [False, True])
def test_route(normalize: bool) -> None:
    scores = normal(9, 12)
    scores[3] = 1.0  # all equal: the first ones
    scores[4, 5:] = -float("inf")
    chosen, shares = poisoned(9, 3, dtype=torch.float32).int(), poisoned(9, 3, dtype=torch.float32)
    route(scores, chosen, shares, normalize=normalize)
    values, places = scores.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    values, places = values[:, :3], places[:, :3]
    assert torch.equal(chosen.long(), places)
    close(shares, values / values.sum(-1, keepdim=True) if normalize else values)


def test_a_row_of_no_numbers_stays_inside() -> None:
    scores = normal(3, 6)
    scores[1] = NAN
    chosen, shares = ints([[-5, -5]] * 3), poisoned(3, 2, dtype=torch.float32)
    route(scores, chosen, shares, normalize=True)
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert shares[1].isnan().all()
    assert shares[[0, 2]].isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 7, 700])
def test_sort_by_expert(num_rows: int) -> None:
    chosen = torch.randint(0, 5, (num_rows, 3), dtype=torch.int32, device=DEVICE)
    chosen[chosen == 2] = 3  # an expert without rows
    order, starts = ints([-1] * (3 * num_rows)), ints([-1] * 6)
    sort_by_expert(chosen, order, starts)
    assert torch.equal(order.long(), chosen.flatten().long().argsort(stable=True))
    assert starts.tolist() == [0, *itertools.accumulate(chosen.flatten().long().bincount(minlength=5).tolist())]


SHAPES = {
    "one row": (1, 8, 2, 48, 40),
    "few": (9, 4, 2, 48, 40),
    "sizes that nothing divides": (5, 3, 1, 50, 35),
    "more rows than a tile": (70, 2, 2, 32, 48),
    "many experts": (6, 60, 4, 32, 16),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fixed", [False, True])
def test_mixture(shape: str, fixed: bool) -> None:
    num_rows, experts, k, hidden, inner = SHAPES[shape]
    made = layer(experts, k, hidden, inner, normalize=shape != "few")
    x = normal(num_rows, hidden)
    close(mixture(made, x, "silu", fixed=fixed), expected(made, x, fixed=fixed))


@pytest.mark.skipif(not GPU, reason="large")
@pytest.mark.parametrize("num_rows", [1, 16, 300, 3000])
def test_large_mixture(num_rows: int) -> None:
    made = layer(128, 8, 2048, 768)
    x = normal(num_rows, 2048)
    close(mixture(made, x, "silu", fixed=True)[-40:], expected(made, x[-40:], fixed=True))
    # Scores of few rows are rounded otherwise than those of many: now and then a row has another expert.
    error = (mixture(made, x, "silu")[-40:].double() - expected(made, x[-40:])).norm(dim=-1)
    assert (error / expected(made, x[-40:]).norm(dim=-1)).median() < TOLERANCE


def test_a_poisoned_row_harms_no_other() -> None:
    made = layer(4, 2, 48, 40)
    x = normal(6, 48)
    whole = mixture(made, x, "silu")
    x[2] = NAN
    found = mixture(made, x, "silu")
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], whole[others])
    assert found[2].isnan().all()


def test_tiles_grow_with_rows() -> None:
    assert [expert_rows(n, 8) for n in (1, 128, 129, 768, 769)] == [16, 16, 64, 64, 128]


@pytest.mark.parametrize("bias", [False, True])
def test_fixed_matmul(bias: bool) -> None:
    x, w, b = normal(70, 50), weight(45, 50), normal(45)
    out = poisoned(70, 45)
    fixed_matmul(x, w, out, bias=b if bias else None)
    close(out, x.double() @ w.double().T + (b.double() if bias else 0))


def test_fixed_rows_are_equal_bit_for_bit() -> None:
    size = 2048 if GPU else 80
    x, w = normal(130, size), weight(96, size)
    whole, made = poisoned(130, 96), layer(4, 2, size, 64)
    fixed_matmul(x, w, whole)
    mixed = mixture(made, x, "silu", fixed=True)
    for begin, end in ((0, 1), (3, 4), (60, 70), (129, 130), (1, 130)):
        part = poisoned(end - begin, 96)
        fixed_matmul(x[begin:end], w, part)
        assert torch.equal(part, whole[begin:end])
        assert torch.equal(mixture(made, x[begin:end], "silu", fixed=True), mixed[begin:end])
