"""The search for memories, on a linear map whose solution is known and on models whose memory expands."""

from typing import NamedTuple

import pytest
import torch
from small_maglev import make_model
from small_models import random_ids

from maglev_hf import rollout_maglev
from maglev_hf.rollout_maglev import BLOCK, MAX_SWEEPS, fixed_point, sequential

D = 4
ROUNDING = 1e-12  # float64, relative to the largest memory


class Part(NamedTuple):
    memory: torch.Tensor
    keep: object


class LinearMap:
    """`m_t = A m_{t-1} + x_t` as a decoder; `A` is a rotation times `growth`. Notes every call, and what was kept."""

    def __init__(self, growth: float | torch.Tensor, length: int, batch: int = 2, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        rotation = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))[0]
        growth = torch.as_tensor(growth, dtype=torch.float64).expand(length)
        self.matrices = rotation * growth[:, None, None]  # [T, D, D], one per token
        self.inputs = torch.randn(batch, length, D, generator=generator, dtype=torch.float64)
        self.first = torch.randn(batch, 1, D, generator=generator, dtype=torch.float64)
        self.columns = slice(0, length)
        self.calls, self.kept = [], []

    def __call__(self, columns: slice, fed: torch.Tensor) -> Part:
        memory = torch.einsum("tij,btj->bti", self.matrices[columns], fed) + self.inputs[:, columns]
        self.calls.append((columns, memory))
        return Part(memory, lambda: self.kept.append(columns))

    def solution(self) -> torch.Tensor:
        """Every memory as the sum of what each input has become by then."""
        terms = [self.first[:, 0]]
        memories = []
        for column in range(self.columns.stop):
            terms = [term @ self.matrices[column].T for term in terms] + [self.inputs[:, column]]
            memories.append(torch.stack(terms).sum(0))
        return torch.stack(memories, dim=1)

    def search(self, tolerance: float, guess: torch.Tensor | None = None):
        return fixed_point(self, self.first, self.columns, guess, tolerance)

    def off_by(self, rollout) -> float:
        found, wanted = torch.cat([part.memory for part in rollout.parts], dim=1), self.solution()
        assert found.shape == wanted.shape
        return ((found - wanted).abs().max() / wanted.abs().max()).item()

    def everything_was_kept_once(self) -> bool:
        borders = [(part.start, part.stop) for part in self.kept]
        return [start for start, _ in borders] == [0, *(stop for _, stop in borders[:-1])] and (
            borders[-1][1] == self.columns.stop
        )


def test_one_token_after_the_other_is_the_solution():
    decoder = LinearMap(1.02, 30)
    rollout = sequential(decoder, decoder.first, decoder.columns)
    assert decoder.off_by(rollout) <= ROUNDING
    assert rollout.sweeps == [1] * 30 and decoder.everything_was_kept_once()


@pytest.mark.parametrize("guessed", [False, True])
def test_after_s_sweeps_the_first_s_memories_are_exact_and_later_ones_are_not(guessed):
    decoder = LinearMap(1.1, 40)
    wrong = torch.randn(2, 40, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    decoder.search(0.0, wrong if guessed else None)
    wanted = decoder.solution()
    assert len(decoder.calls) == 40
    for sweep, (_, memory) in enumerate(decoder.calls, start=1):
        off = (memory - wanted).abs().amax(dim=(0, 2)) / wanted.abs().max()
        assert off[:sweep].max() <= ROUNDING
        assert sweep == 40 or off[sweep] > 1e-4


@pytest.mark.parametrize(("growth", "tolerance"), [(0.5, 1e-3), (0.5, 1e-6), (0.1, 1e-6), (0.8, 1e-4)])
def test_a_contracting_map_takes_as_many_sweeps_as_its_rate_says(growth, tolerance):
    """A memory moves by about `growth ** s` in sweep `s`."""
    decoder = LinearMap(growth, BLOCK)
    rollout = decoder.search(tolerance)
    expected = torch.log(torch.tensor(tolerance)) / torch.log(torch.tensor(growth))
    assert len(rollout.sweeps) == 1 and abs(rollout.sweeps[0] - expected) <= 0.25 * expected + 3
    # What is left to move after a sweep is a geometric series; it is root mean square, the difference a maximum.
    assert decoder.off_by(rollout) <= 2 * tolerance * growth / (1 - growth)
    assert decoder.everything_was_kept_once()


def test_a_sweep_that_begins_at_the_solution_is_the_last_one():
    decoder = LinearMap(1.1, 50)
    rollout = decoder.search(1e-9, guess=decoder.solution())
    assert rollout.sweeps == [1] and decoder.off_by(rollout) <= ROUNDING


def test_a_search_may_begin_anywhere_in_a_call_and_the_guess_is_that_of_the_whole_call():
    decoder = LinearMap(1.1, 50)
    wanted = decoder.solution()
    rollout = fixed_point(decoder, wanted[:, 19:20], slice(20, 50), wanted, 1e-9)
    assert rollout.sweeps == [1]
    assert (rollout.parts[0].memory - wanted[:, 20:]).abs().max() <= ROUNDING * wanted.abs().max()


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_long_calls_are_searched_block_by_block(length):
    decoder = LinearMap(0.5, length)
    rollout = decoder.search(1e-13)
    assert decoder.off_by(rollout) <= 2e-13 + ROUNDING
    assert decoder.everything_was_kept_once()
    assert [part.stop - part.start for part in decoder.kept] == [BLOCK] * (length // BLOCK) + [length % BLOCK] * (
        length % BLOCK > 0
    )
    assert len(rollout.sweeps) == len(rollout.parts) == len(decoder.kept)


def test_an_expanding_map_falls_back_to_one_token_after_the_other():
    decoder = LinearMap(1.05, BLOCK)
    rollout = decoder.search(1e-4)
    assert decoder.off_by(rollout) <= ROUNDING
    assert rollout.sweeps == [MAX_SWEEPS] + [1] * (BLOCK - MAX_SWEEPS - 1)
    assert decoder.everything_was_kept_once()
    assert decoder.kept[0].stop == MAX_SWEEPS + 1  # exact after so many sweeps, and the one that reads the last of them


def test_memories_that_hardly_move_are_not_kept_where_the_search_failed():
    """A map that expands only slowly: within the sweeps nothing moves by more than the tolerance at first, but what is
    left of an error would grow."""
    growth = torch.full((BLOCK,), 1.2)
    growth[:100] = 0.9
    decoder = LinearMap(growth, BLOCK)
    rollout = decoder.search(1e-2)
    assert rollout.sweeps[0] == MAX_SWEEPS and len(rollout.sweeps) > 1
    assert decoder.off_by(rollout) <= ROUNDING


def test_blocks_that_settled_stay_and_all_after_a_failure_are_made_one_by_one():
    growth = torch.full((3 * BLOCK,), 0.3)
    growth[BLOCK : 2 * BLOCK] = 1.05
    decoder = LinearMap(growth, 3 * BLOCK)
    rollout = decoder.search(1e-14)
    assert decoder.off_by(rollout) <= ROUNDING
    assert [part.stop - part.start for part in decoder.kept] == [BLOCK, MAX_SWEEPS + 1] + [1] * (
        2 * BLOCK - MAX_SWEEPS - 1
    )


@pytest.mark.parametrize(("growth", "length"), [(1.1, MAX_SWEEPS), (0.3, BLOCK), (2.0, MAX_SWEEPS + 40)])
def test_with_tolerance_0_the_result_is_that_of_single_steps(growth, length):
    searched, stepped = LinearMap(growth, length), LinearMap(growth, length)
    found = torch.cat([part.memory for part in searched.search(0.0).parts], dim=1)
    wanted = torch.cat([part.memory for part in sequential(stepped, stepped.first, stepped.columns).parts], dim=1)
    assert ((found - wanted).abs() <= ROUNDING * wanted.abs().amax()).all()


@pytest.mark.parametrize("length", [5, MAX_SWEEPS, BLOCK + 10])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_ends_the_search_and_stays_in_its_row(length, value):
    decoder = LinearMap(0.5, length)
    decoder.inputs[0, 3] = value
    rollout = decoder.search(1e-6)
    assert len(decoder.calls) <= MAX_SWEEPS + 1 + length
    assert decoder.everything_was_kept_once()
    found, wanted = torch.cat([part.memory for part in rollout.parts], dim=1), decoder.solution()
    assert (found[0, :3] - wanted[0, :3]).abs().max() <= 1e-6 and not found[0, 3:].isfinite().any()
    assert (found[1] - wanted[1]).abs().max() <= 1e-6


# A model whose memory expands

T = 80


def expanding_model():
    """Weights so large that a change of one memory grows from token to token; slowly, or rounding would show too."""
    return make_model(std=0.5, memory_injection="residual")


@pytest.fixture
def fallbacks(monkeypatch):
    """Tokens that were made one by one because a search had failed, per fallback."""
    counts = []

    def counted(run, memory, columns, honest=rollout_maglev.sequential):
        counts.append(columns.stop - columns.start)
        return honest(run, memory, columns)

    monkeypatch.setattr(rollout_maglev, "sequential", counted)
    return counts


@pytest.mark.parametrize("batch", ["one row", "left-padded"])
@torch.no_grad()
def test_a_model_with_expanding_memory_falls_back_and_gives_the_sequential_logits(fallbacks, batch):
    model = expanding_model()
    ids = random_ids(model, T)
    if batch == "left-padded":
        ids = torch.cat([random_ids(model, T, batch=2, seed=1), ids])
    mask = torch.ones_like(ids)
    if batch == "left-padded":
        mask[0, :40], mask[1, : T - 3] = 0, 0
    stepped = model(ids, attention_mask=mask, rollout="sequential")
    assert not fallbacks
    searched = model(ids, attention_mask=mask, rollout="fixed_point")
    assert fallbacks == [T - MAX_SWEEPS - 1]
    real = mask == 1
    # float64; everything is exact, since a search that fails keeps nothing that has merely settled
    assert (searched.logits - stepped.logits)[real].abs().max() <= 1e-9
    assert (searched.past_key_values.memory - stepped.past_key_values.memory).abs().max() <= 1e-9


@torch.no_grad()
def test_small_differences_in_that_model_really_grow():
    """Or the test above would say nothing of what a failed search leaves behind."""
    model = expanding_model()
    ids = random_ids(model, T)
    made = model.model(ids, rollout="sequential").last_hidden_state
    fed = torch.cat([torch.zeros_like(made[:, :1]), made[:, :-1]], dim=1)
    fed[:, 40] += 1e-6
    cache = model.model(ids[:, :41], fed=fed[:, :41], use_cache=True).past_key_values
    moved = model.model(ids[:, 41:], past_key_values=cache, rollout="sequential").last_hidden_state - made[:, 41:]
    assert moved[:, -1].abs().max() > 1e-5
