"""Text from a checkpoint of any layout: one process, on a CPU or one GPU, token by token.

Every token computes its whole context again, the last `seq_len` tokens (as many as the model has positions for). Not
covered: keys and values kept between tokens, several texts at once, models that do not fit one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from netlayer import environ
from netlayer.config.tree import ModelConfig, build_section
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.workload.model_size import num_parameters, qkv_width, up_width
from trainer.checkpoint.meta import Meta
from trainer.checkpoint.reader import open_found
from trainer.data.tokenizer import END_OF_DOCUMENT, load_tokenizer
from trainer.model.gpt import GPT, build_model

_UNFINISHED = "\ufffd"  # what a character shows as whose last bytes are still to come


class Sampler:
    """A model and its tokenizer, loaded from a checkpoint.

    Raises:
        ConfigError: the checkpoint is damaged, or too large for the device.
    """

    def __init__(self, meta: Meta, device: torch.device) -> None:
        config = model_of(meta)
        _check_room(meta, config, device)
        self.tokenizer = load_tokenizer(meta.tokenizer_file, config.vocab_size)
        self.path, self.device, self.config = meta.path, device, config
        self.model = _load(meta, config, device)

    def text(self, prompt: str, count: int, temperature: float, top_k: int, seed: int) -> Iterator[str]:
        """The prompt, then what follows it, in parts as they come; ends early where the model ends the document.

        Args:
            prompt: nothing: a new document.
            count: most tokens to add.
            temperature: of the softmax; 0: always the likeliest token.
            top_k: draw among so many of the likeliest; 0: among all.
            seed: the same gives the same text on the same kind of device.

        Raises:
            CheckFailed: the model's answer is no number.
            ConfigError: there is no prompt, and the tokenizer of an imported model no token that begins a document.
        """
        end = self.tokenizer.token_to_id(END_OF_DOCUMENT)  # None: it never ends early
        prompt_ids = [] if end is None else [end]
        prompt_ids += self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if not prompt_ids:
            rule = f"is needed: the tokenizer of {self.path} has no {END_OF_DOCUMENT} to begin with"
            raise ConfigError("--prompt", None, rule, "give the text to resume from")
        yield prompt
        drawn: list[int] = []
        sent = ""
        for token in self.tokens(prompt_ids, count, temperature, top_k, seed):
            if token == end:
                break
            drawn.append(token)
            text = self.tokenizer.decode(drawn)
            if not text.endswith(_UNFINISHED):
                yield text[len(sent) :]
                sent = text
        yield self.tokenizer.decode(drawn)[len(sent) :]

    @torch.no_grad()
    def tokens(self, prompt_ids: Sequence[int], count: int, temperature: float, top_k: int, seed: int) -> Iterator[int]:
        """Yield `count` tokens that follow `prompt_ids`, as in `text`."""
        generator, context = torch.Generator().manual_seed(seed), list(prompt_ids)
        for _ in range(count):
            logits_V = next_logits(self.model, context, self.device)[: self.tokenizer.get_vocab_size()]
            if not logits_V.isfinite().all():
                rule = "its logits are not finite: training has broken its parameters"
                raise CheckFailed(f"{self.path}: {rule}; take an earlier checkpoint")
            token = draw(logits_V, temperature, top_k, generator)
            context.append(token)
            yield token


@torch.no_grad()
def next_logits(model: GPT, context: Sequence[int], device: torch.device) -> Tensor:
    """Return the logits of the token after `context`, [V] in float64 on the CPU; it sees the last `seq_len` tokens."""
    if model.embedding is None or model.head is None:
        raise ValueError("a run of layers gives no logits: load the whole model")
    seen = list(context[-model.config.seq_len :])
    last = len(seen) - 1
    if device.type == "cuda" and model.config.attention_window:  # that kernel is compiled for one length
        seen += [0] * (model.config.seq_len - len(seen))  # behind: nobody who matters sees them
    x_TBD: Tensor = model.embedding(torch.tensor([seen], device=device))
    for block in model.blocks.values():
        x_TBD = block(x_TBD)
    return model.head.logits(x_TBD[last : last + 1])[0, 0].double().cpu()


def draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token: the likeliest at temperature 0, else one by chance among the `top_k` likeliest (0: all)."""
    if not temperature:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    probability_V = ((logits_V - logits_V.max()) / temperature).softmax(0)
    return int(torch.multinomial(probability_V, 1, generator=generator))


def choose_device(name: str) -> torch.device:
    """Return the device of `cpu`, `cuda`, or `auto`: a GPU where there is one.

    Raises:
        HardwareMissing: cuda, and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise HardwareMissing("--device cuda: torch finds no GPU here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def model_of(meta: Meta) -> ModelConfig:
    """The shape of a checkpoint's model, without what only training needs."""
    return build_section(
        ModelConfig, {**meta.model, "recompute": "none", "compile": False, "operators": "auto"}, "job.model."
    )


def needed_bytes(config: ModelConfig) -> int:
    """Parameters, the activations of one block and the float64 logits of one position, about."""
    width: int = getattr(torch, config.dtype).itemsize
    attention = qkv_width(config) + config.attention_width
    context = config.seq_len * width * (2 * config.hidden + attention + 3 * up_width(config))
    return num_parameters(config) * width + context + 8 * config.vocab_size


def _load(meta: Meta, config: ModelConfig, device: torch.device) -> GPT:
    """Load one parameter after the other: there are no two copies of the model at any time."""
    dtype = getattr(torch, config.dtype)
    model = build_model(config, 0, torch.device("meta")).to(dtype).to_empty(device=device)
    with torch.no_grad(), open_found(meta) as checkpoint:
        for name, parameter in model.named_parameters():
            if name not in checkpoint:
                raise ConfigError(meta.field, meta.path, f"lacks {name}", "give an older checkpoint")
            parameter.copy_(checkpoint.read(name))
    return model.eval()


def _check_room(meta: Meta, config: ModelConfig, device: torch.device) -> None:
    needed = needed_bytes(config)
    there = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else environ.available_memory_bytes()
    if needed > there:
        rule = f"{num_parameters(config):,} parameters take about {needed / 2**30:,.1f} GiB"
        where = "the GPU" if device.type == "cuda" else "this machine"
        remedy = "give --device cpu" if device.type == "cuda" else "take a machine with more memory"
        raise ConfigError(meta.field, meta.path, f"{rule}, and {where} has {there / 2**30:,.1f} GiB free", remedy)
