"""The one typed tree: what fabric there is (`cluster`) and what is trained on it (`job`).

Components receive their own section, never the tree. An unknown key fails and names the nearest one; a rule between two
fields fails with both values and a remedy. Not covered: files and `--set` (`netlayer.config.file`), and whether the
switches have the ports that the fabric needs (topology checks a design when it builds it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from netlayer.config.checkpoint import CheckpointConfig as CheckpointConfig
from netlayer.config.errors import SWITCH_OR_AUTO, translate
from netlayer.config.launch import LaunchConfig as LaunchConfig
from netlayer.config.launch import StoreConfig as StoreConfig
from netlayer.config.model import RecomputeModule, RecomputeModules, settle_recompute
from netlayer.config.model import RopeScalingConfig as RopeScalingConfig
from netlayer.config.observe import ObserveConfig
from netlayer.config.parallel import ParallelConfig as ParallelConfig
from netlayer.config.parallel import check_context, check_fp8
from netlayer.config.renamed import with_new_keys
from netlayer.config.resilience import ResilienceConfig
from netlayer.config.section import Section as Section
from netlayer.errors import ConfigError
from netlayer.units import parse_rate, parse_size
from netlayer.workload.presets import MODELS

Model = TypeVar("Model", bound=BaseModel)
BitsPerSecond = Annotated[int, BeforeValidator(parse_rate), Field(gt=0, le=10**15)]
Bytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=2**50)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Price = Annotated[float, Field(ge=0)]


class PricesConfig(Section):
    """Price of one piece; a piece without a price is not in the cost, and named."""

    switch: Price | None = Field(None, description="one switch")
    nic: Price | None = Field(None, description="one NIC")
    nic_cable: Price | None = Field(None, description="one cable at a ToR's port down, with all its NIC ends")
    fibre: Price | None = Field(None, description="one cable between switches, without optics")
    optic: Price | None = Field(None, description="one optic; a cable between switches has two")
    currency: str = Field("", pattern="^[A-Za-z]*$", description="what the prices are in, such as EUR; only printed")


class ClusterConfig(Section):
    """The fabric: servers, their NICs, and the switches between them."""

    name: str = Field("laptop", description="what reports call this cluster")
    servers: Count = Field(1, description="servers in the job's partition")
    gpus_per_server: Count = Field(2, le=1024, description="GPUs (ranks) a server")
    nics_per_server: Count = Field(1, le=256, description="RDMA NICs a server")
    nic_bps: BitsPerSecond = Field(
        200_000_000_000, description="rate of one NIC, bits per second; '200G' is understood"
    )
    nvlink_bps: BitsPerSecond = Field(
        3_600_000_000_000, description="NVLink rate of one GPU and direction, bits per second"
    )
    rails: Count = Field(1, description="rails: NIC i of every server hangs under a ToR of rail i mod rails")
    rail_only: bool = Field(False, description="no switch joins two rails: spines and core of each rail are its own")
    tiers: Literal[2, 3] = Field(3, description="2: ToR and spine; 3: ToR, spine, core")
    switch_radix: Count = Field(64, le=4096, description="ports of a switch at switch_port_bps")
    switch_port_bps: BitsPerSecond = Field(400_000_000_000, description="rate of one switch port, bits per second")
    aoc_split: bool = Field(
        True, description="split ToR downlink ports by AOC cables, so that an uplink is faster than a NIC"
    )
    oversubscription: float = Field(1.0, ge=1, le=1000, description="ToR downlink capacity over uplink capacity")
    servers_per_tor_set: Count = Field(64, description="servers that share one set of ToRs (one ToR a rail)")
    pods: Count = Field(1, description="pods: ToR sets that share their spines")
    core_switches_per_plane: Count = Field(4, description="core switches that each spine of a plane reaches (3 tiers)")
    gpu_memory_bytes: Bytes = Field(
        0, description="memory of one GPU, '80GiB', by which a preview says what does not fit; 0: it does not"
    )
    prices: PricesConfig = Field(default_factory=PricesConfig, description="what parts cost; all are optional")

    @property
    def num_gpus(self) -> int:
        return self.servers * self.gpus_per_server

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.nics_per_server % self.rails:
            _fail(
                "cluster.rails",
                self.rails,
                f"must divide cluster.nics_per_server = {self.nics_per_server}",
                "set both equal, or one rail",
            )
        if self.nic_bps > self.switch_port_bps:
            _fail(
                "cluster.nic_bps",
                self.nic_bps,
                f"is above cluster.switch_port_bps = {self.switch_port_bps}",
                "a NIC cannot be faster than the port it hangs on",
            )
        return self


class ModelConfig(Section):
    """A GPT: its shape."""

    preset: str = Field(
        "", description="a known shape, for all keys that are not given: 125m, 7b, 175b, llama3-8b, ..."
    )
    layers: Count = Field(4, description="transformer blocks")
    hidden: Count = Field(128, description="width of the residual stream")
    heads: Count = Field(4, description="attention heads")
    kv_heads: int = Field(0, ge=0, description="key and value heads, each shared by heads / kv_heads; 0 = heads")
    head_dim: int = Field(0, ge=0, description="values of one attention head; 0 = hidden / heads")
    qk_norm: bool = Field(False, description="RMSNorm of each head's queries and keys, before they are turned (Qwen3)")
    ffn_hidden: Count = Field(512, description="width inside the MLP")
    vocab_size: Count = Field(2048, description="tokens of the vocabulary")
    seq_len: Count = Field(128, description="tokens of one sequence")
    parallel_block: bool = Field(False, description="y = x + MLP(LN(x)) + Attention(LN(x)), one LN (MegaScale 3.1)")
    attention_window: int = Field(0, ge=0, description="sliding-window attention: keys a query sees; 0 = all before it")
    window_pattern: str = Field(
        "w", pattern="^[wf]+$", description="which layers have the window (w) and which none (f), over and over: wwwf"
    )
    positions: Literal["learned", "rotary"] = Field("learned", description="learned embedding, or rotary (RoFormer)")
    rotary_base: float = Field(10_000.0, gt=1, description="rotary: longest wavelength over 2 pi, in tokens")
    rope_scaling: RopeScalingConfig = Field(
        default_factory=RopeScalingConfig, description="rotary: lower frequencies, for longer texts"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="how the residual stream is normalised")
    norm_eps: float = Field(
        1e-5, gt=0, lt=1, description="added to the variance of every norm; rms_norm_eps of a config.json"
    )
    activation: Literal["gelu", "swiglu"] = Field("gelu", description="of the MLP; swiglu adds a gate")
    bias: bool = Field(True, description="whether linears of the blocks add a bias")
    tied_embeddings: bool = Field(False, description="the head's projection is the token embedding")
    dtype: Literal["float64", "float32", "bfloat16"] = Field("float32", description="dtype of the computation")
    compile: bool = Field(False, description="compile each block (torch.compile)")
    operators: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="norms, activations, loss, AdamW: our Triton kernels, or torch's; auto: ours on GPUs, uncompiled, "
        "and matmuls by the algorithm that is the fastest when measured: 20 s at the start of a 7B model",
    )
    fp8: Literal["off", "tensorwise", "blockwise"] = Field(
        "off",
        description="products of the blocks' linears in 8-bit floats, masters and sums in float32. tensorwise: one "
        "scale a tensor, by its largest value now; blockwise: one a tile of 1 x 128, of weights 128 x 128",
    )
    fp8_first: int = Field(0, ge=0, description="blocks at the start whose linears stay in dtype, where others are fp8")
    fp8_last: int = Field(0, ge=0, description="blocks at the end whose linears stay in dtype, where others are fp8")
    fp8_param_gather: bool = Field(
        False,
        description="weights of linears in fp8 travel so between data-parallel ranks, and lie so on each: half the "
        "bytes of bfloat16, the same numbers; ranks first share the largest magnitudes, once a step",
    )
    fp8_tp_gather: bool = Field(
        False,
        description="inputs of linears in fp8 are quantised before tensor-parallel ranks gather them: half the bytes "
        "of bfloat16; one scale for all ranks' rows, shared ahead of each gather; needs fp8 = tensorwise",
    )
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        description="what backward computes again: none, selective (recompute_modules), full (blocks); auto: none, and "
        "selective with parallel.zero = 3 or where memory is short",
    )
    recompute_modules: RecomputeModules = Field(
        "mlp_act",
        description="with recompute = selective, of mlp_act (output of GeLU or SwiGLU), layernorm (outputs of both "
        "norms) and core_attn (attention; between tensor-parallel ranks the linear after it too); several as a list "
        "or with spaces between",
    )

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Values of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Values of all heads: of the queries, and of what attention gives; not always `hidden`."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Values of all heads of keys, or of values."""
        return self.num_kv_heads * self.head_width

    def is_float8(self, layer: int) -> bool:
        """Whether the linears of a layer are in 8 bits."""
        return self.fp8 != "off" and self.fp8_first <= layer < self.layers - self.fp8_last

    def recomputes(self, module: RecomputeModule) -> bool:
        """Whether backward computes the outputs of these modules again, and blocks are not recomputed whole.

        Where blocks are compiled, the compiler chooses itself what it keeps of norms and activations.
        """
        is_chosen = self.recompute == "selective" and module in self.recompute_modules.split()
        return is_chosen and (module == "core_attn" or not self.compile)

    def window(self, layer: int) -> int:
        """Keys that a query of the layer sees; 0 = all before it."""
        return self.attention_window if self.window_pattern[layer % len(self.window_pattern)] == "w" else 0

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        """Fill in the keys of the preset, which those that are set override."""
        name = values.get("preset") if isinstance(values, Mapping) else None
        if not name or not isinstance(name, str):
            return values
        if name not in MODELS:
            _fail("job.model.preset", name, f"must be one of {', '.join(MODELS)}", "or omit it, and give a shape")
        return {**MODELS[name], **values}

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if not self.head_dim and self.hidden % self.heads:
            rule = f"must divide job.model.hidden = {self.hidden}"
            _fail("job.model.heads", self.heads, rule, "change either, or set job.model.head_dim")
        if self.heads % self.num_kv_heads:
            _fail("job.model.kv_heads", self.kv_heads, f"must divide job.model.heads = {self.heads}", "change either")
        if self.positions == "rotary" and self.head_width % 2:
            width = "job.model.head_dim" if self.head_dim else "job.model.hidden / job.model.heads"
            rule = f"turns pairs, and a head has {width} = {self.head_width} values"
            _fail("job.model.positions", self.positions, rule, "make it even")
        if self.attention_window > self.seq_len:
            _fail(
                "job.model.attention_window",
                self.attention_window,
                f"is above job.model.seq_len = {self.seq_len}",
                "set 0 for full attention",
            )
        return self


class BatchConfig(Section):
    """Sequences a step."""

    global_batch_size: Count = Field(16, description="sequences of one optimiser step, over all ranks")
    micro_batch_size: Count = Field(8, description="sequences a rank holds in one forward pass")
    start_size: int = Field(
        0, ge=0, description="sequences of the first steps, ramped up to global_batch_size; 0 = no ramp"
    )
    increment: int = Field(0, ge=0, description="sequences by which a ramp grows at a time")
    increment_steps: Count = Field(1, description="steps between two increments of a ramp")

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.start_size > self.global_batch_size:
            rule = f"is above job.batch.global_batch_size = {self.global_batch_size}, at which the ramp ends"
            _fail("job.batch.start_size", self.start_size, rule, "lower it, or set 0 for no ramp")
        if 0 < self.start_size < self.global_batch_size and not self.increment:
            rule = f"takes no batch from job.batch.start_size = {self.start_size} to {self.global_batch_size}"
            _fail("job.batch.increment", self.increment, rule, "say by how many sequences the batch grows at a time")
        if self.increment and not self.start_size:
            rule = "has no effect: there is no ramp, for job.batch.start_size = 0"
            _fail("job.batch.increment", self.increment, rule, "set start_size, or leave increment out")
        return self


class DatasetConfig(Section):
    """One dataset of a blend."""

    path: str = Field(
        min_length=1,
        description="folder of netlayer data prepare, Megatron's prefix (.bin, .idx), or a .npy file of token ids",
    )
    weight: float = Field(1.0, gt=0, description="its part of the samples, against the other datasets' weights")
    loss_mask: str = Field(
        "", description="as many numbers as the dataset has tokens, 0 for each that is no target; empty: all are"
    )


DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class DataConfig(Section):
    """Text to train on, or datasets of tokens."""

    folder: str = Field("", description="folder of text files; empty: the Python standard library's own sources")
    pattern: str = Field("*.py", description="which files of the folder, by name, in all its subfolders")
    validation_share: Share = Field(0.1, gt=0, description="share of the files held out for validation")
    max_mib: float = Field(16.0, gt=0, description="most text to read, MiB; files are drawn by seed beyond it")
    datasets: dict[DatasetName, DatasetConfig] = Field(
        default_factory=dict,
        description="tokens to train on in place of the text, by name: a table with path, weight and loss_mask each",
    )
    evaluation: dict[DatasetName, str] = Field(
        default_factory=dict, description="datasets to take held-out losses on, by name: the path of each"
    )
    sampling: Literal["auto", "replacement", "epochs"] = Field(
        "auto",
        description="epochs: every sequence once, in an order of each epoch's own; replacement: drawn anew each time; "
        "auto: replacement of text, epochs of datasets",
    )
    max_epochs: float = Field(0.0, ge=0, description="refuse a job that reads a dataset more often; 0: no limit")
    packing: Literal["stream", "documents"] = Field(
        "stream",
        description="documents: attention and loss stop where a document ends; stream: they do not",
    )
    loader: bool = Field(
        True, description="one process a machine reads epochs ahead for all its ranks; false: each rank reads its own"
    )
    read_ahead: int = Field(4, ge=2, le=1024, description="steps that the loader holds in shared memory")
    ring_folder: str = Field(
        "",
        description="folder for the loader's memory, where ranks of a machine run in containers that share it; empty: "
        "/dev/shm, or the folder of temporary files where that is too small",
    )

    @property
    def counts_samples(self) -> bool:
        """True if samples count up through epochs; they are drawn with replacement else."""
        return bool(self.datasets) or self.sampling == "epochs"

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.datasets and self.sampling == "replacement":
            rule = "is of text, and job.data.datasets names tokens"
            _fail("job.data.sampling", self.sampling, rule, "omit it, or set epochs")
        if self.datasets and not self.evaluation:
            _fail(
                "job.data.evaluation",
                None,
                "names no dataset to take held-out losses on, and job.data.datasets has none held out",
                "name one: [job.data.evaluation] held_out = PATH",
            )
        if self.evaluation and not self.datasets:
            rule = "has no effect without job.data.datasets: of text, files are held out"
            _fail("job.data.evaluation", ", ".join(self.evaluation), rule, "omit it")
        if not self.counts_samples:
            for key, default in (("max_epochs", 0.0), ("packing", "stream")):
                if (value := getattr(self, key)) != default:
                    rule = "has no effect where samples are drawn with replacement"
                    _fail(f"job.data.{key}", value, rule, "set job.data.sampling to epochs, or omit it")
        return self

    @property
    def masks(self) -> bool:
        """True if some tokens are no targets."""
        return self.packing == "documents" or any(each.loss_mask for each in self.datasets.values())


class OptimizerConfig(Section):
    """Optimiser, learning-rate schedule and gradient clipping."""

    name: Literal["adamw", "lamb"] = Field("adamw", description="adamw, or lamb for large batches (MegaScale 3.1)")
    steps: Count = Field(300, description="optimiser steps")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="how it falls after the warm-up; wsd: stable, then a line down over the last decay_share"
    )
    min_lr_ratio: Share = Field(0.1, description="last learning rate, as a share of the peak; constant has none")
    decay_share: Share = Field(0.2, gt=0, description="wsd: share of the steps over which the learning rate falls")
    warmup_steps: int = Field(20, ge=0, description="steps of linear warm-up")
    beta1: Share = Field(0.9, description="decay of the first moment")
    beta2: Share = Field(0.95, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay, matrices only")
    max_grad_norm: float = Field(1.0, ge=0, description="global gradient norm to clip at; 0 = off")


class EvaluationConfig(Section):
    """Evaluation of held-out loss: before the first step, every `every_steps`, after the last; over how much text."""

    every_steps: Count = Field(50, description="steps between two evaluations")
    global_batches: Count = Field(4, description="global batches of held-out text in one evaluation")


class LoopConfig(Section):
    """Settings of the training loop around the steps."""

    gc_interval: int = Field(
        50, ge=0, description="steps between two garbage collections, of all ranks at once; 0: whenever Python will"
    )
    cuda_graph: bool = Field(
        False, description="replay whole steps as CUDA graphs, where the host bounds them; no pipeline stages"
    )


class MetricsConfig(Section):
    """Additional outputs of each step's metrics besides metrics.jsonl; from rank 0."""

    tensorboard: bool = Field(False, description="events for TensorBoard in the folder tensorboard/ of the output")
    prometheus_port: int = Field(
        0, ge=0, le=65535, description="serve the last row as gauges, and counters, here; 0: nowhere"
    )
    prometheus_old_names: bool = Field(
        False, description="serve step_ms, tokens_per_s and memory_gib too, as gauges had been named"
    )
    prometheus_address: str = Field("127.0.0.1", min_length=1, description="to listen on; 0.0.0.0: for all hosts")


def _switch_or_auto(value: object) -> object:
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(SWITCH_OR_AUTO)
    return value


class OverlapConfig(Section):
    """Communication under computation; each technique is a switch, so that it can be measured."""

    dp: bool = Field(True, description="prefetch all-gathers and launch reduce-scatters as gradients complete")
    tp: bool = Field(True, description="cut the products of tensor-parallel linears, and carry parts under them")
    save_gathered_input: bool = Field(
        False,
        description="tensor-parallel linears keep the rows of all ranks until their backward pass, and do not gather "
        "them again there: a fifth less to carry, for memory; worth it where that takes longer than the products",
    )
    pp: bool = Field(True, description="send and receive apart, under the computation of a pipeline stage")
    cp: bool = Field(
        True,
        description="gather keys and values of the other context-parallel ranks, and send back their gradients, under "
        "the attention among a rank's own; false: wait for each",
    )
    zero_bubble: bool = Field(
        True,
        description="a pipeline stage computes weights' gradients where it would wait, not before it sends its input's "
        "on, for the memory of at most pp - 1 activations more; not without overlap.pp, with recomputation or with "
        "compiled blocks",
    )
    prefetch: Count = Field(2, description="all-gathers launched ahead of the computation that waits for them")
    bucket_mib: float = Field(64.0, ge=0, description="largest all-gather or reduce-scatter, MiB; 0: one a block")
    reduce_dtype: Literal["float32", "bfloat16"] = Field("float32", description="of gradients on the wire")
    windows: Annotated[bool | Literal["auto"], BeforeValidator(_switch_or_auto)] = Field(
        "auto",
        description="parameters and gradients in NCCL's symmetric windows: gathers go by copy engines on one host; "
        "faster too where NCCL has few blocks. auto: where all data-parallel ranks are on one host with NVSwitch, NCCL "
        "is 2.28 or later, and the GPU has the memory",
    )
    peer_memory: bool = Field(
        True,
        description="where GPUs of a group reach each other's memory, copy engines carry tensor-parallel exchanges, "
        "pipeline messages and gradients; false: NCCL does, as between hosts",
    )
    peer_reduce: bool = Field(
        True,
        description="where windows are taken, and in ZeRO stage 3, copy engines carry gradients to the peers, and a "
        "kernel adds them: no multiprocessor is held meanwhile; one host, 2 to 8 data-parallel ranks, CuPy; not "
        "without overlap.peer_memory; false: NCCL reduces",
    )
    step_in_backward: bool = Field(
        False,
        description="step each bucket as its gradients land, and gather under the backward pass: dp alone, no clipping",
    )

    @property
    def copies_gradients(self) -> bool:
        """True if copy engines may send gradients to the peers."""
        return self.peer_memory and self.peer_reduce


class WatchConfig(Section):
    """Detection of the rank that hangs a collective; see `collectives.watch.watchdog`."""

    enabled: bool = Field(True, description="name the rank that holds up the others, and end the run")
    timeout_s: float = Field(
        0.0,
        ge=0,
        description="seconds that a rank may hold up the others within steps; 0: three step times, as measured. "
        "Evaluations, checkpoints and compilation have job.parallel.distributed_timeout_s",
    )
    floor_s: float = Field(
        10.0,
        gt=0,
        description="the least of three step times, seconds, for a rank that does not answer or does something else; "
        "2 s at most for one whose process was stopped or has ended",
    )
    compare_replicas_every: int = Field(
        0,
        ge=0,
        description="steps between two comparisons of the data-parallel replicas, bit by bit, for silent corruption of "
        "data; each costs a read of all parameters and the forward pass of a micro-batch. 0: never",
    )
    compare_losses: bool = Field(
        True, description="with it, also the loss of one batch that every replica computes; off: the parameters alone"
    )


class NcclConfig(Section):
    """Settings of NCCL's InfiniBand transport; unset ones keep NCCL's defaults."""

    flap_s: float = Field(5.0, gt=0, le=300, description="longest link flap to outlive, seconds: chooses the timeout")
    timeout: int | None = Field(None, ge=1, le=31, description="exponent T of 4.096 us * 2^T, in place of flap_s")
    retry_cnt: int = Field(7, ge=0, le=7, description="retransmissions before a queue pair gives up (three bits)")
    traffic_class: int | None = Field(None, ge=0, le=255, description="the whole TOS byte: DSCP * 4 + ECN")
    fifo_traffic_class: int | None = Field(None, ge=0, le=255, description="the same, of NCCL's control messages")
    gid_index: int | None = Field(None, ge=-1, le=255, description="which GID; -1: NCCL looks for a RoCE v2 one")
    hca: str | None = Field(None, pattern=r"^[=^]{0,2}[A-Za-z0-9_.:,-]+$", description="NICs to use: mlx5_0,mlx5_1")
    qps_per_connection: int | None = Field(None, ge=1, le=128, description="queue pairs, so source ports, a connection")
    split_data_on_qps: bool | None = Field(None, description="each message over all of them, not one after another")
    adaptive_routing: bool | None = Field(None, description="the fabric reorders packets: completions apart from data")
    pci_relaxed_ordering: int | None = Field(None, ge=0, le=2, description="0 off, 1 on, 2 where the NIC can")
    merge_nics: bool | None = Field(None, description="two ports of one NIC as one device")
    cross_nic: int | None = Field(
        None, ge=0, le=2, description="rings over different NICs: 0 no, 1 yes, 2 where better"
    )
    port_failover: bool | None = Field(None, description="go on over another port where one fails")


class JobConfig(Section):
    """The training run."""

    name: str = Field("tiny-gpt", description="what reports call this job")
    model: ModelConfig = Field(default_factory=ModelConfig, description="shape of the GPT")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="degrees of parallelism")
    batch: BatchConfig = Field(default_factory=BatchConfig, description="sequences a step")
    data: DataConfig = Field(default_factory=DataConfig, description="text to train on")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="how parameters move")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="when held-out loss is taken")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="when training is saved")
    loop: LoopConfig = Field(default_factory=LoopConfig, description="garbage collection, CUDA graphs")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="TensorBoard, Prometheus")
    overlap: OverlapConfig = Field(default_factory=OverlapConfig, description="communication under computation")
    store: StoreConfig = Field(default_factory=StoreConfig, description="where ranks meet")
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="how ranks are started")
    watch: WatchConfig = Field(default_factory=WatchConfig, description="who is named when ranks hang")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="events of every rank")
    nccl: NcclConfig = Field(default_factory=NcclConfig, description="what NCCL's InfiniBand transport is told")
    resilience: ResilienceConfig = Field(
        default_factory=ResilienceConfig, description="faults and restarts of netlayer run"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_new_keys(cls, tree: Any) -> Any:
        return with_new_keys(tree) if isinstance(tree, Mapping) else tree

    @model_validator(mode="after")
    def _rules(self) -> Self:
        """Check the rules between sections; a ConfigError says both values and the remedy."""
        settle_recompute(self)
        model, parallel, batch = self.model, self.parallel, self.batch
        if model.heads % parallel.tp:
            _fail("job.parallel.tp", parallel.tp, f"must divide job.model.heads = {model.heads}", "lower tp")
        if model.num_kv_heads % parallel.tp:
            _fail(
                "job.parallel.tp", parallel.tp, f"must divide the {model.num_kv_heads} key and value heads", "lower tp"
            )
        for name in ("ffn_hidden", "seq_len"):
            if getattr(model, name) % parallel.tp:
                rule = f"must divide job.model.{name} = {getattr(model, name)}"
                _fail("job.parallel.tp", parallel.tp, rule, "change either")
        check_context(self)
        check_fp8(self)
        if model.layers % (parallel.pp * parallel.vpp):
            _fail(
                "job.parallel",
                f"pp {parallel.pp} x vpp {parallel.vpp}",
                f"must divide job.model.layers = {model.layers}",
                "lower pp or vpp",
            )
        if parallel.vpp > 1 and parallel.pp == 1:
            _fail("job.parallel.vpp", parallel.vpp, "needs a pipeline, but job.parallel.pp = 1", "set vpp to 1")
        if self.loop.cuda_graph and parallel.pp > 1:
            rule = f"cannot be had with job.parallel.pp = {parallel.pp}"
            _fail("job.loop.cuda_graph", True, rule, "omit it, or change that")
        self._check_step_in_backward()
        self._check_zero()
        self._check_masks()
        self._check_replicas()
        stages = parallel.pp if parallel.vpp > 1 else 1  # interleaved, micro-batches go in rounds of as many as stages
        unit = batch.micro_batch_size * parallel.data_ranks * stages
        for name in ("global_batch_size", "start_size", "increment"):
            if getattr(batch, name) % unit:
                size = batch.micro_batch_size
                factors = f"job.batch.micro_batch_size x job.parallel.{parallel.data_degrees.format(size)}"
                rule = f"must be a multiple of {factors}" + f" x {stages} interleaved stages" * (stages > 1)
                _fail(f"job.batch.{name}", getattr(batch, name), rule, f"set it to {unit} or a multiple")
        return self

    def _check_step_in_backward(self) -> None:
        """Refuse settings that need all gradients before the first update."""
        parallel, optimizer = self.parallel, self.optimizer
        in_the_way = {
            f"job.optimizer.max_grad_norm = {optimizer.max_grad_norm:g}": optimizer.max_grad_norm > 0,
            f"job.optimizer.name = {optimizer.name}": optimizer.name == "lamb",
            f"job.parallel.tp = {parallel.tp}": parallel.tp > 1,
            f"job.parallel.pp = {parallel.pp}": parallel.pp > 1,
            f"job.parallel.cp = {parallel.cp}": parallel.cp > 1,
            "job.loop.cuda_graph = true": self.loop.cuda_graph,
        }
        conflicts = [key for key, is_in_the_way in in_the_way.items() if is_in_the_way]
        if self.overlap.step_in_backward and conflicts:
            rule = f"cannot be had with {' and '.join(conflicts)}"
            _fail(
                "job.overlap.step_in_backward",
                True,
                rule,
                "omit it, or change that (max_grad_norm = 0 clips nothing)",
            )

    def _check_replicas(self) -> None:
        """Refuse comparisons that find nothing, or after which no sound checkpoint would be left."""
        every, saved = self.watch.compare_replicas_every, self.checkpoint
        name, span = "job.watch.compare_replicas_every", (saved.keep - 1) * saved.every_steps
        if every and self.parallel.data_ranks == 1:
            _fail(name, every, "needs replicas, but job.parallel.dp = 1", "set it to 0")
        if every and saved.every_steps and span < every:
            rule = f"is above the {span} steps that the older of job.checkpoint.keep = {saved.keep} checkpoints span"
            _fail(name, every, f"{rule}: one from before a corruption must be left", "lower it, or raise keep")
        if every and saved.peer_copies:
            rule = "does not go with job.checkpoint.peer_copies: a corrupt copy in memory could not be taken back"
            _fail(name, every, rule, "set either to 0")

    def _check_zero(self) -> None:
        """Refuse settings that need parameters which stay."""
        for key, is_in_the_way in (
            ("job.loop.cuda_graph", self.loop.cuda_graph),
            ("job.overlap.step_in_backward", self.overlap.step_in_backward),
            ("job.overlap.windows", self.overlap.windows is True),
        ):
            if self.parallel.zero == 3 and is_in_the_way:
                _fail("job.parallel.zero", 3, f"cannot be had with {key} = true", "set zero = 2, or change that")

    def _check_masks(self) -> None:
        """Refuse settings that cannot tell one sequence's documents apart."""
        if not self.data.masks:
            return
        key = "job.data.packing" if self.data.packing == "documents" else "job.data.datasets"
        value = self.data.packing if self.data.packing == "documents" else "with a loss_mask"
        for name, is_in_the_way in (
            ("job.loop.cuda_graph", self.loop.cuda_graph),
            ("job.model.compile", self.model.compile),
        ):
            if is_in_the_way:
                _fail(key, value, f"cannot be had with {name} = true", "omit one of them")


class Config(Section):
    """The whole tree."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="the fabric")
    job: JobConfig = Field(default_factory=JobConfig, description="the training run")

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if "job" in self.model_fields_set:  # a file of a cluster alone is good for what concerns the fabric alone
            self.check_world()
        return self

    def check_world(self) -> None:
        """Refuse a job whose degrees do not fill the cluster.

        Raises:
            ConfigError: the product of all degrees is not the number of the cluster's GPUs.
        """
        parallel, world = self.job.parallel, self.cluster.num_gpus
        ranks = parallel.layout.world_size
        if ranks != world:
            _fail(
                "job.parallel",
                f"{parallel.layout.degrees} = {ranks} ranks",
                f"must equal cluster.servers x cluster.gpus_per_server = {world}",
                "change a degree or the number of servers",
            )


def build_config(tree: Mapping[str, Any]) -> Config:
    """The typed tree from plain nested dictionaries.

    Raises:
        ConfigError: a key is unknown, a value breaks a rule.
    """
    return build_section(Config, tree)


def build_section(model: type[Model], tree: Mapping[str, Any], prefix: str = "") -> Model:
    """Build one section from nested dictionaries; errors as `build_config`, each field's name after `prefix`."""
    try:
        return model.model_validate(tree)
    except ValidationError as exc:
        raise translate(exc, model, prefix) from exc


def _fail(field: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise ConfigError(field, value, rule, remedy)
