"""`netlayer checkpoint export|import|reshard`: there and back to the bit; bad input is one line and leaves nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from netlayer.cli import cli
from netlayer.config.file import load_config
from netlayer.config.tree import EvaluationConfig, JobConfig, ModelConfig, build_config
from netlayer.errors import ConfigError
from tests.trainer.foreign_models import (
    MODELS,
    config_named,
    logits_of,
    random_model,
    save_as_theirs,
    values_of,
)
from trainer.checkpoint.dcp import state_name
from trainer.checkpoint.foreign.convert import (
    export_checkpoint,
    import_model,
    model_in,
    new_folder,
    open_foreign,
    reshard_checkpoint,
)
from trainer.checkpoint.foreign.hugging_face import architecture_of, layout_of
from trainer.checkpoint.foreign.layouts import gpt2_layout, torchtitan_layout
from trainer.checkpoint.listing import list_checkpoints
from trainer.checkpoint.meta import check_model, check_same_text, find, resume_notes, seed_of
from trainer.checkpoint.reader import open_checkpoint, write_checkpoint
from trainer.checkpoint.resume import Start, check_steps_left
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Trainer, run
from trainer.plan import prepare
from trainer.sample import Sampler

from .conftest import tiny_job

pytestmark = [
    pytest.mark.usefixtures("_no_sync"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # dcp's word for one process
]

Values = dict[str, Tensor]


def save_own(path: Path, config: ModelConfig, values: Values, **more: Any) -> Path:
    job = build_config({"job": {"model": config.model_dump(mode="json", exclude={"preset"})}}).job
    return write_checkpoint(path, values.items(), job, **more)


def read_own(path: Path) -> Values:
    with open_checkpoint(path) as source:
        return {name: source.read(name) for name in source.names()}


def export(path: Path, out: Path, target: Any, *options: Any) -> Path:
    with open_checkpoint(path, "PATH") as source:
        return export_checkpoint(source, model_in(source), out, target, *options).path


def assert_same(one: Values, other: Values) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def call(*arguments: object, code: int = 0) -> str:
    """Return stdout, or the line of the error."""
    result = CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])
    if isinstance(result.exception, ConfigError):
        assert code == result.exception.exit_code
        return str(result.exception)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A checkpoint of step 5, and its model as transformers would save it, next to it in `hf`."""
    config = config_named("Llama")
    values = values_of(random_model(config))
    save_as_theirs(tmp_path / "hf", config, layout_of("LlamaForCausalLM", config), values)
    return save_own(tmp_path / "run" / "step-000005", config, values, step=5, seed=3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_hugging_face_comes_back_to_the_bit(name: str, dtype: str, tmp_path: Path) -> None:
    config = config_named(name, dtype=dtype)
    values = values_of(random_model(config))
    narrow = getattr(torch, dtype)
    theirs = save_as_theirs(tmp_path / "hf", config, layout_of(architecture_of(config), config), values, narrow)
    import_model(open_foreign(theirs, "huggingface"), tmp_path / "ours")
    assert_same(read_own(tmp_path / "ours"), {key: tensor.to(narrow).float() for key, tensor in values.items()})
    assert load_config(tmp_path / "ours" / "job.toml").job.model == JobConfig(model=config).model
    export(tmp_path / "ours", tmp_path / "again", "huggingface", narrow, 10_000)
    files = [path.name for path in (tmp_path / "again").glob("*.safetensors")]
    assert len(files) > 1
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    again = {key: tensor for file in files for key, tensor in load_file(tmp_path / "again" / file).items()}
    assert_same(again, load_file(theirs / "model.safetensors"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in again.values())


@pytest.mark.parametrize(("target", "origin"), [("safetensors", "safetensors"), ("dcp", "dcp"), ("torchtitan", "dcp")])
@pytest.mark.parametrize("name", ["Llama", "Llama, tied, scaled as 3.1"])
def test_every_other_layout_comes_back_to_the_bit(target: str, origin: Any, name: str, tmp_path: Path) -> None:
    config = config_named(name)
    values = values_of(random_model(config))
    save_own(tmp_path / "ours", config, values)
    theirs = export(tmp_path / "ours", tmp_path / "theirs", target)
    written = import_model(open_foreign(theirs, origin), tmp_path / "back")
    assert written.num_tensors == len(values)
    assert_same(read_own(tmp_path / "back"), values)
    meta = find(tmp_path / "back")
    assert (meta.step, meta.model["rope_scaling"]) == (0, config.rope_scaling.model_dump())


def test_plain_torch_loads_what_is_exported(llama: Path, tmp_path: Path) -> None:
    """`dcp.load` into tensors of its own, by torchtitan's names; q and k have their rows in another order there."""
    values = read_own(llama)
    theirs = export(llama, tmp_path / "titan", "torchtitan")
    layout = torchtitan_layout(config_named("Llama"))
    state = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
    dcp.load(state, checkpoint_id=theirs)
    assert_same(state, dict(layout.to_theirs(values.__getitem__)))
    assert not torch.equal(state["layers.0.attention.qkv_linear.wq.weight"], values["blocks.0.qkv.weight"][:24])
    plain = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
    dcp.load(plain, checkpoint_id=export(llama, tmp_path / "dcp", "dcp"))
    assert_same(plain, values)


def test_a_tied_table_has_both_names_for_torchtitan(tmp_path: Path) -> None:
    config = config_named("Llama, tied, scaled as 3.1")
    values = values_of(random_model(config))
    theirs = export(save_own(tmp_path / "ours", config, values), tmp_path / "titan", "torchtitan")
    state = {name: torch.zeros(61, 24) for name in ("tok_embeddings.weight", "lm_head.weight")}
    dcp.load(state, checkpoint_id=theirs)
    assert torch.equal(state["lm_head.weight"], values["embedding.tokens.weight"])
    assert torch.equal(state["tok_embeddings.weight"], values["embedding.tokens.weight"])


def test_what_plain_torch_and_an_older_torchtitan_saved_is_imported(tmp_path: Path) -> None:
    """`dcp.save`, which puts no digests there; names as torchtitan had them before `qkv_linear`."""
    config = config_named("Llama")
    values = values_of(random_model(config))
    state = {
        name.replace("qkv_linear.", "").replace("lm_head", "output"): tensor.clone(
            memory_format=torch.contiguous_format
        )
        for name, tensor in torchtitan_layout(config).to_theirs(values.__getitem__)
    }
    dcp.save({**state, "optimizer": {"state": {"lr": torch.ones(1)}}}, checkpoint_id=tmp_path / "titan")
    with pytest.raises(ConfigError, match=r"does not say of which model it is: it has no job\.toml; give a job file"):
        open_foreign(tmp_path / "titan", "dcp")
    job = export(save_own(tmp_path / "ours", config, values), tmp_path / "own", "safetensors") / "job.toml"
    import_model(open_foreign(tmp_path / "titan", "dcp", job), tmp_path / "back")
    assert_same(read_own(tmp_path / "back"), values)


def test_a_file_of_the_first_years_of_gpt_2_is_imported(tmp_path: Path) -> None:
    """No `transformer.` before names, and buffers of the mask among the tensors."""
    config = config_named("GPT-2")
    values = values_of(random_model(config))
    theirs = save_as_theirs(tmp_path / "hf", config, gpt2_layout(config, ""), values)
    tensors = load_file(theirs / "model.safetensors")
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    save_file(tensors, theirs / "model.safetensors")
    import_model(open_foreign(theirs, "huggingface"), tmp_path / "ours")
    assert_same(read_own(tmp_path / "ours"), values)


def test_a_tied_head_that_is_stored_is_not_lost(tmp_path: Path) -> None:
    """A copy of the embedding is no extra tensor; another table is refused, for one of both would be lost."""
    config = config_named("Llama, tied, scaled as 3.1")
    values = values_of(random_model(config))
    theirs = save_as_theirs(tmp_path / "hf", config, layout_of("LlamaForCausalLM", config), values)
    tensors = load_file(theirs / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, theirs / "model.safetensors")
    import_model(open_foreign(theirs, "huggingface"), tmp_path / "ours")
    assert_same(read_own(tmp_path / "ours"), values)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, theirs / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, and .* ties them"
    ):
        open_foreign(theirs, "huggingface")


def test_seq_len_may_be_shorter_than_what_a_rotary_model_reads(llama: Path, tmp_path: Path) -> None:
    assert open_foreign(tmp_path / "hf", "huggingface", seq_len=8).model.seq_len == 8
    assert open_foreign(tmp_path / "hf", "huggingface").model.seq_len == 32


# ---------------------------------------------------------------------------------------------------- wrong inputs


KEY = "model.layers.1.self_attn.k_proj.weight"


def tensors(**changed: Tensor | None) -> Callable[[Path], None]:
    """Return what changes tensors of a folder; None removes one; `__` is a dot."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        state = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in changed.items()}}
        save_file({name: tensor for name, tensor in state.items() if tensor is not None}, file)

    return change


def config(**changed: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def written(name: str, content: object) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(json.dumps(content)) and None


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


INDEX = {"weight_map": {KEY: "model-00001-of-00002.safetensors"}}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 61}}, "added_tokens": []}
k_proj, layer_0 = "model__layers__1__self_attn__k_proj__weight", "model__layers__0__self_attn__"


@pytest.mark.parametrize(
    ("breaks", "line"),
    [
        (cut_short, r"model\.safetensors: is no whole safetensors file \(.*\); download or write it again"),
        (written("model.safetensors", "x" * 99), r"model\.safetensors: is no whole safetensors file"),
        (tensors(**{k_proj: None}), rf"hf: lacks {KEY}; give all files"),
        (tensors(**{f"{layer_0}sinks": torch.ones(6)}), r"hf: has model\.layers\.0\.self_attn\.sinks, which the model"),
        (
            tensors(**{f"{layer_0}q_proj__bias": torch.ones(24)}),
            r"has model\.layers\.0\.self_attn\.q_proj\.bias, which",
        ),
        (config(vocab_size=64), r"embed_tokens\.weight has shape \[61, 24\], and its configuration says \[64, 24\]"),
        (config(num_hidden_layers=3), r"hf: lacks model\.layers\.2\.input_layernorm\.weight, .* and 6 more"),
        (config(num_key_value_heads=6), r"k_proj\.weight has shape \[8, 24\], and its configuration says \[24, 24\]"),
        (config(head_dim=8), r"q_proj\.weight has shape \[24, 24\], and its configuration says \[48, 24\]"),
        (tensors(**{k_proj: torch.ones(8, 24, dtype=torch.int8)}), r"k_proj\.weight is I8: must be one of F64, F32"),
        (tensors(lm_head__weight=None), r"hf: lacks lm_head\.weight"),
        (lambda folder: (folder / "config.json").unlink(), r"hf: has no config\.json"),
        (written("config.json", [1]), r"config\.json: is no JSON object"),
        (written("tokenizer.json", TOKENIZER), r"tokenizer\.json: has a token 61, and the model has 61 tokens"),
        (written("tokenizer.json", []), r"tokenizer\.json: is no tokenizer"),
        (
            written("model.safetensors.index.json", INDEX),
            r"model-00001-of-00002\.safetensors: is not there, and the in",
        ),
        (written("model.safetensors.index.json", []), r"index\.json: is no index of safetensors files"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"hf: has no safetensors file, and pytorch_model\.bin may hold code",
        ),
        (shutil.rmtree, r"hf: is not there"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    llama: Path, tmp_path: Path, breaks: Callable[[Path], object], line: str
) -> None:
    breaks(tmp_path / "hf")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=line) as failure:
        import_model(open_foreign(tmp_path / "hf", "huggingface"), tmp_path / "ours")
    assert "\n" not in str(failure.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_overwritten(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for line in (
        call("export", llama, tmp_path / "there", "--to", "huggingface", code=2),
        call("import", tmp_path / "hf", tmp_path / "there", "--from", "huggingface", code=2),
        call("reshard", llama, tmp_path / "there", code=2),
    ):
        assert line == f"OUT = {tmp_path}/there: is there already; give a new folder, or remove it"
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("target", ["huggingface", "dcp"])
def test_an_interruption_and_a_full_disk_leave_nothing(
    llama: Path, tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.rglob("*"))

    def interrupted(done: int, total: int, _text: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    def full(done: int, total: int, _text: str) -> None:
        if done > total // 2:
            raise OSError(28, "No space left on device")

    foreign = open_foreign(tmp_path / "hf", "huggingface")
    with open_checkpoint(llama, "PATH") as source:
        for stop, expected in ((interrupted, KeyboardInterrupt), (full, ConfigError)):
            with pytest.raises(expected):
                export_checkpoint(source, model_in(source), tmp_path / "out", target, None, 1 << 30, stop)
            with pytest.raises(expected):
                import_model(foreign, tmp_path / "out", stop)
            with pytest.raises(expected):
                reshard_checkpoint(source, tmp_path / "out", 1 << 30, on_progress=stop)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_export_left_is_replaced(llama: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "model.safetensors").write_bytes(b"half")
    export(llama, tmp_path / "out", "safetensors")
    assert not (tmp_path / ".out.part").exists()
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), read_own(llama))


def test_two_processes_do_not_make_one_folder(llama: Path, tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as part:
        (part / "half").touch()
        for line in (
            call("export", llama, tmp_path / "out", "--to", "dcp", code=2),
            call("import", tmp_path / "hf", tmp_path / "out", "--from", "huggingface", code=2),
            call("reshard", llama, tmp_path / "out", code=2),
        ):
            assert re.fullmatch(r"OUT = .*/out: is being made by process .*; wait for it, or give another folder", line)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["half"]
    assert not list(tmp_path.glob(".out*"))


def test_a_damaged_checkpoint_is_not_exported(llama: Path, tmp_path: Path) -> None:
    file = llama / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    line = call("export", llama, tmp_path / "out", "--to", "huggingface", code=2)
    assert "__0_0.distcp: is damaged" in line
    assert not (tmp_path / "out").exists()


def test_a_model_that_nobody_else_has_is_exported_under_our_names_alone(tmp_path: Path) -> None:
    config = ModelConfig.model_validate({**MODELS["Llama"], "layers": 1, "parallel_block": True})
    own = save_own(tmp_path / "ours", config, values_of(random_model(config)))
    for target in ("huggingface", "torchtitan"):
        line = call("export", own, tmp_path / "out", "--to", target, code=2)
        assert line.startswith("job.model.parallel_block = True: ")
    call("export", own, tmp_path / "out", "--to", "safetensors")
    call("import", tmp_path / "out", tmp_path / "back", "--from", "safetensors")
    assert_same(read_own(tmp_path / "back"), read_own(own))


# ---------------------------------------------------------------------------------------------------- reshard


def with_moments(values: Values) -> Values:
    moments = {
        state_name(name, key): tensor * 0.5 for name, tensor in values.items() for key in ("exp_avg", "exp_avg_sq")
    }
    return values | moments


@pytest.mark.parametrize("file_size", ["8KB", "50GiB"])
def test_reshard_keeps_every_bit_and_all_facts(llama: Path, tmp_path: Path, file_size: str) -> None:
    config, tokenizer = config_named("Llama"), b'{"model": {"vocab": {"a": 0}}}'
    state = with_moments(read_own(llama))
    facts: dict[str, Any] = {"step": 7, "seed": 11, "data": {"num_samples": 56}, "corpus": {"text": "1"}}
    path = save_own(tmp_path / "step-000007", config, state, tokenizer=tokenizer, **facts)
    call("reshard", path, tmp_path / "again", "--file-size", file_size)
    before, after = read_own(path), read_own(tmp_path / "again")
    assert_same(after, before)
    one, other = find(path), find(tmp_path / "again")
    assert (one.step, one.seed, one.data, one.corpus, one.job) == (
        other.step,
        other.seed,
        other.data,
        other.corpus,
        other.job,
    )
    assert other.tokenizer_file.read_bytes() == tokenizer
    files = list((tmp_path / "again").glob("*.distcp"))
    assert (len(files) > 5) == (file_size == "8KB")
    call("reshard", path, tmp_path / "model", "--model-only")
    assert_same(
        read_own(tmp_path / "model"), {name: tensor for name, tensor in before.items() if name in read_own(llama)}
    )


def test_format_3_is_brought_up_to_date(format_3: Path, tmp_path: Path) -> None:
    """Of two tensor-parallel ranks and two stages; a padded vocabulary, and moments."""
    assert find(format_3).format == 3
    call("reshard", format_3, tmp_path / "new")
    assert find(tmp_path / "new").format == 4
    before, after = read_own(format_3), read_own(tmp_path / "new")
    assert_same({name: after[name] for name in before}, before)
    call("export", format_3, tmp_path / "theirs", "--to", "safetensors")
    call("import", tmp_path / "theirs", tmp_path / "back", "--from", "safetensors")
    assert_same(read_own(tmp_path / "back"), {name: before[name] for name in read_own(tmp_path / "back")})


def test_a_pending_checkpoint_is_not_rewritten_as_a_good_one(llama: Path, tmp_path: Path) -> None:
    pending = llama.rename(llama.with_name("step-000005.new"))
    assert "is not verified yet" in call("reshard", pending, tmp_path / "out", code=2)


@pytest.fixture
def format_3(tmp_path: Path) -> Path:
    archive = Path(__file__).parents[1] / "data" / "format_3" / "tp2-pp2.tar.xz"
    shutil.unpack_archive(archive, tmp_path / "old", filter="data")
    return next((tmp_path / "old").rglob("meta.json")).parent


# ---------------------------------------------------------------------------------------------------- training


def tiny_llama(text_folder: Path, tmp_path: Path) -> tuple[Path, JobConfig, Values]:
    """An imported Llama of the tiny job's sizes, with a job that trains it, and its values."""
    config = config_named("Llama", vocab_size=300, seq_len=16)
    values = values_of(random_model(config))
    theirs = save_as_theirs(tmp_path / "hf", config, layout_of("LlamaForCausalLM", config), values)
    import_model(open_foreign(theirs, "huggingface"), tmp_path / "ours")
    keys = load_config(tmp_path / "ours" / "job.toml").job.model.model_dump(exclude={"preset"})
    return tmp_path / "ours", tiny_job(text_folder, model=keys, optimizer={"steps": 4, "lr": 1e-2}), values


def test_an_imported_model_trains_from_the_first_step_with_a_new_optimiser(
    text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    ours, job, values = tiny_llama(text_folder, tmp_path)
    meta = find(ours)
    check_model(meta, job)
    trainer = Trainer(job, corpus, 5, RankInfo(0, 1, torch.device("cpu")))
    trainer.resume(meta)
    (chunk,) = trainer.model.chunks
    assert_same({name: tensor.clone() for name, tensor in chunk.full_state_dict().items()}, values)
    losses: list[float] = []
    run(trainer, EvaluationConfig(), lambda row: losses.append(row["loss"]), lambda _row: None)
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_a_run_from_an_imported_model_has_its_own_seed_text_and_samples(text_folder: Path, tmp_path: Path) -> None:
    """What a run that goes on is refused: nothing was trained yet."""
    ours, job, _values = tiny_llama(text_folder, tmp_path)
    meta = find(ours)
    assert (seed_of(meta, 9, job), seed_of(meta, None, job)) == (9, 0)
    assert resume_notes(meta, job) == [
        f"starts with the parameters of {ours}: with the first step, and a new optimiser"
    ]
    check_same_text(meta, {"text": "another", "tokenizer": "another"}, job)
    assert check_steps_left(Start(meta), job)


def test_a_text_is_read_in_the_tokens_of_the_imported_model(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = config_named("Llama", vocab_size=300, seq_len=16)
    values = values_of(random_model(config))
    theirs = save_as_theirs(tmp_path / "hf", config, layout_of("LlamaForCausalLM", config), values)
    tokenizer = corpus.tokenizer_file.read_text()
    for name, content in (("with", tokenizer), ("without", tokenizer.replace("<|end|>", "<|im_end|>"))):
        (theirs / "tokenizer.json").write_text(content)
        import_model(open_foreign(theirs, "huggingface"), tmp_path / name)
    job = tiny_job(text_folder, model=config.model_dump(exclude={"preset"}))
    read = prepare(job, 1, 0, tmp_path, resume=tmp_path / "with")
    assert read.tokenizer_file.read_text() == corpus.tokenizer_file.read_text()
    with pytest.raises(ConfigError, match=r"has no <\|end\|> to end a document .*; make tokens with netlayer"):
        prepare(job, 1, 0, tmp_path, resume=tmp_path / "without")


def test_text_of_an_imported_model_needs_a_prompt_where_no_token_begins_one(corpus: Corpus, tmp_path: Path) -> None:
    config = config_named("Llama", vocab_size=300, seq_len=16)
    tokenizer = corpus.tokenizer_file.read_text().replace("<|end|>", "<|im_end|>").encode()
    sampler = Sampler(
        find(save_own(tmp_path / "own", config, values_of(random_model(config)), tokenizer=tokenizer)),
        torch.device("cpu"),
    )
    assert "".join(sampler.text("the rank", 5, 0.0, 0, 0)).startswith("the rank")
    with pytest.raises(ConfigError, match=r"--prompt: is needed: the tokenizer of .* has no <\|end\|> to begin with"):
        "".join(sampler.text("", 5, 0.0, 0, 0))


@pytest.mark.slow
def test_what_transformers_saves_is_imported_and_trained_by_its_job_file(
    text_folder: Path, tmp_path: Path, transformers: Any
) -> None:
    """The whole way of a user: transformers' folder, import, train, and export of the trained run."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 16}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **more)).save_pretrained(tmp_path / "hf")
    call("import", tmp_path / "hf", tmp_path / "ours", "--from", "huggingface")
    sets = {"data.folder": text_folder, "data.pattern": "*.txt", "parallel.dp": 1, "optimizer.steps": 3}
    sets |= {"batch.global_batch_size": 4, "batch.micro_batch_size": 2, "checkpoint.every_steps": 3}
    options = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    options += ["--set", "cluster.gpus_per_server=1", "--resume", tmp_path / "ours", "--out", tmp_path / "run"]
    command = [sys.executable, "-m", "netlayer", "train", tmp_path / "ours" / "job.toml", *options]
    trained = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, check=False)
    assert trained.returncode == 0, trained.stderr
    assert "with the first step, and a new optimiser" in trained.stderr
    assert [row.step for row in list_checkpoints(tmp_path / "run")] == [3]
    call("export", tmp_path / "run", tmp_path / "theirs", "--to", "huggingface")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs").encode("the rank")
    assert not torch.equal(model.lm_head.weight, load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"])


# ------------------------------------------------------------------------------------- transformers, where it is there


@pytest.fixture(scope="module")
def transformers() -> Any:
    module = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'netlayer[dev]'")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_our_logits(name: str, tmp_path: Path, transformers: Any) -> None:
    """And what it saves of that comes back to the bit."""
    config = config_named(name)
    model = random_model(config)
    theirs = export(save_own(tmp_path / "ours", config, values_of(model)), tmp_path / "hf", "huggingface")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(theirs, output_loading_info=True)
    assert not any(report.values()), report
    tokens_BT = torch.randint(61, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits_BTV = loaded(tokens_BT).logits
    torch.testing.assert_close(logits_BTV, logits_of(model, tokens_BT), rtol=0, atol=1e-5)
    assert logits_BTV.std() > 0.5
    loaded.save_pretrained(tmp_path / "saved")
    import_model(open_foreign(tmp_path / "saved", "huggingface"), tmp_path / "back")
    assert_same(read_own(tmp_path / "back"), values_of(model))
    assert load_config(tmp_path / "back" / "job.toml").job.model == JobConfig(model=config).model


def test_what_transformers_saves_in_bfloat16_computes_the_same_here(tmp_path: Path, transformers: Any) -> None:
    """A head that is wider than hidden / heads, shared keys, a base of its own, several files."""
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "head_dim": 10, "vocab_size": 61, "max_position_embeddings": 64}
    rope = {"rope_theta": 777.0}
    version = int(transformers.__version__.partition(".")[0])
    base = rope if version < 5 else {"rope_parameters": {**rope, "rope_type": "default"}}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **more, **base, initializer_range=0.2))
    model.bfloat16().save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    foreign = open_foreign(tmp_path / "hf", "huggingface")
    assert (foreign.model.rotary_base, foreign.model.head_width, foreign.model.dtype) == (777.0, 10, "bfloat16")
    import_model(foreign, tmp_path / "ours")
    values = read_own(tmp_path / "ours")
    ours = random_model(foreign.model)
    ours.load_state_dict(values)
    tokens_BT = torch.randint(61, (1, 64), generator=torch.Generator().manual_seed(5))
    # Read again: `model.bfloat16()` has rounded its rotary frequencies too.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens_BT).logits, logits_of(ours, tokens_BT), rtol=0, atol=1e-5)
    again = export(tmp_path / "ours", tmp_path / "again", "huggingface", torch.bfloat16)
    with safe_open(again / "model.safetensors", framework="pt") as file:
        for name, tensor in model.bfloat16().state_dict().items():
            assert torch.equal(file.get_tensor(name), tensor), name
