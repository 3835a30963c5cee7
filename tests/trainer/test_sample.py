"""Text from checkpoints: of any layout, within the model's positions, the same for a seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from netlayer import environ
from netlayer.config.tree import EvaluationConfig, ModelConfig
from netlayer.errors import CheckFailed, ConfigError
from tests.trainer import layout_ranks
from tests.trainer.test_layouts import LLAMA, job_of
from trainer.checkpoint.meta import find
from trainer.checkpoint.reader import open_found
from trainer.commands.sample import sample
from trainer.data.prepare import Corpus
from trainer.data.tokenizer import END_OF_DOCUMENT
from trainer.loop import RankInfo, Trainer, run
from trainer.model.gpt import build_model
from trainer.sample import Sampler, draw, next_logits

from .conftest import tiny_job

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On busy cores the threads of a small product wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(text_folder: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the small text."""
    sections = {"optimizer": {"steps": 60, "lr": 2e-2}, "checkpoint": {"every_steps": 60}}
    out = tmp_path_factory.mktemp("learned")
    trainer = Trainer(tiny_job(text_folder, **sections), corpus, 0, RankInfo(0, 1, CPU))
    run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, out)
    return out


@pytest.fixture(scope="module")
def sampler(checkpoint: Path) -> Sampler:
    return Sampler(find(checkpoint), CPU)


def text(sampler: Sampler, seed: int = 0, **changed: float) -> str:
    settings = {"count": 40, "temperature": 1.0, "top_k": 0, **changed}
    count, temperature, top_k = int(settings["count"]), settings["temperature"], int(settings["top_k"])
    return "".join(sampler.text("the rank", count, temperature, top_k, seed))


def test_a_seed_gives_its_text_and_another_seed_another(sampler: Sampler) -> None:
    first = text(sampler)
    assert first.startswith("the rank ")
    assert first == text(sampler)
    assert first != text(sampler, seed=1)


def test_temperature_0_is_the_likeliest_whatever_the_seed(sampler: Sampler) -> None:
    greedy = text(sampler, temperature=0)
    assert greedy == text(sampler, temperature=0, seed=1) == text(sampler, top_k=1)
    assert any(word in greedy for word in ("sends", "drops", "holds"))  # what the text says behind a rank


def test_the_last_positions_are_seen_and_no_more(sampler: Sampler) -> None:
    """Behind a long text comes what comes behind its end: 16 positions."""
    context = list(range(60, 100))
    assert torch.equal(
        next_logits(sampler.model, context, CPU), next_logits(sampler.model, context[-sampler.config.seq_len :], CPU)
    )
    assert not torch.equal(next_logits(sampler.model, context[:-1], CPU), next_logits(sampler.model, context, CPU))


@pytest.mark.parametrize("window", [0, 4])
def test_logits_are_those_that_the_loss_takes(window: int) -> None:
    config = ModelConfig(
        layers=2, hidden=32, heads=2, ffn_hidden=64, vocab_size=50, seq_len=16, attention_window=window
    )
    model = build_model(config, 0, CPU)
    tokens = torch.arange(17)[None]
    logits = [next_logits(model, tokens[0, : end + 1].tolist(), CPU) for end in range(16)]
    expected = torch.nn.functional.cross_entropy(torch.stack(logits), tokens[0, 1:])
    assert float(model(tokens[:, :-1], tokens[:, 1:]).detach()) == pytest.approx(float(expected), abs=1e-5)


def test_draws_follow_the_softmax_and_stay_in_the_top_k() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    count = 4000

    def shares(temperature: float, top_k: int) -> Tensor:
        drawn = torch.tensor([draw(logits_V, temperature, top_k, generator) for _ in range(count)])
        return drawn.bincount(minlength=4) / count

    torch.testing.assert_close(shares(1.0, 0), logits_V.softmax(0).float(), atol=0.03, rtol=0)
    torch.testing.assert_close(shares(2.0, 0), (logits_V / 2).softmax(0).float(), atol=0.03, rtol=0)
    assert shares(5.0, 2)[2:].tolist() == [0, 0]


def test_no_character_is_shown_before_it_is_whole(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character of several tokens, one a byte, comes as one part."""
    ids = sampler.tokenizer.encode("a漢🎉").ids

    def tokens(*_: object) -> Iterator[int]:
        yield from ids

    monkeypatch.setattr(sampler, "tokens", tokens)
    parts = list(sampler.text("", 10, 1.0, 0, 0))
    assert len(ids) == 8
    assert [part for part in parts if part] == ["a", "漢", "🎉"]


def test_parts_of_a_spread_model_are_joined(tmp_path: Path) -> None:
    """Files of two tensor-parallel ranks, two stages each, are one model."""
    job = job_of({}, LLAMA, {})
    expected = layout_ranks.train(job, 0, 1, save=tmp_path).parameters
    meta = find(tmp_path)
    with open_found(meta) as checkpoint:
        for name, value in expected.items():
            assert torch.equal(checkpoint.read(name), value)


def test_the_command_writes_text_as_it_comes(checkpoint: Path, sampler: Sampler) -> None:
    words = [str(checkpoint), "--prompt", "the rank", "--tokens", "40", "--device", "cpu"]
    result = CliRunner().invoke(sample, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == text(sampler) + "\n"
    assert "step 60, about" in result.stderr


def test_a_prompt_that_names_the_end_of_a_document_is_not_cut(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []

    def tokens(given: list[int], *_: object) -> Iterator[int]:
        heard.extend(given)
        yield from ()

    monkeypatch.setattr(sampler, "tokens", tokens)
    prompt = f"the {END_OF_DOCUMENT} rank"
    assert "".join(sampler.text(prompt, 10, 1.0, 0, 0)) == prompt
    assert heard[0] == sampler.tokenizer.token_to_id(END_OF_DOCUMENT)
    assert heard.count(heard[0]) == 1
    assert sampler.tokenizer.decode(heard[1:]) == prompt


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_of_broken_parameters_writes_nothing(checkpoint: Path, temperature: float) -> None:
    broken = Sampler(find(checkpoint), CPU)
    torch.nn.init.constant_(next(broken.model.parameters()), float("nan"))
    with pytest.raises(CheckFailed, match=r"step-000060: its logits are not finite: .*; take an earlier checkpoint"):
        text(broken, temperature=temperature)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--temperature", "nan"], "--temperature = nan: is no number"),
        (["--prompt", "\udcff\udcfe"], r"--prompt = '\udcff\udcfe': is not UTF-8 text"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(sample, ["runs/a", *words], catch_exceptions=False)
    assert says in str(caught.value)


def test_what_is_no_checkpoint_or_too_large_is_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"CHECKPOINT = .*: holds no checkpoint"):
        CliRunner().invoke(sample, [str(tmp_path)], catch_exceptions=False)
    monkeypatch.setattr(environ, "available_memory_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"parameters take about 0\.0 GiB, and this machine has 0\.0 GiB free"):
        Sampler(find(checkpoint), CPU)


def test_a_checkpoint_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    layout_ranks.train(job_of({}, LLAMA, {}), 0, 1, save=tmp_path)
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json"):
        Sampler(find(tmp_path), CPU)
