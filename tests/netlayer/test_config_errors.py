"""What is wrong in a file or an override, in one line: which key was meant, and how the value is written."""

from __future__ import annotations

import pytest

from netlayer.config.file import load_config
from netlayer.errors import ConfigError
from tests.netlayer.refusal import refusal


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("job.model.layer=3", "job.model.layer: unknown key; did you mean layers?"),
        ("job.zzz=3", "known keys here: name, model"),
        ("layers=6", "layers: unknown key; did you mean job.model.layers?"),
        ("seqlen=6", "seqlen: unknown key; did you mean job.model.seq_len?"),
        ("dp=4", "did you mean job.parallel.dp or job.overlap.dp?"),
        ("optimiser.steps=1", "optimiser: unknown key; did you mean job.optimizer?"),
        ("cluster.servers=true", "cluster.servers = True: must be a whole number"),
        ("cluster.servers=2.0", "cluster.servers = 2.0: must be a whole number"),
        ("job.optimizer.lr=true", "job.optimizer.lr = True: must be a number"),
        ("job.overlap.dp=1", "job.overlap.dp = 1: must be true or false"),
        ("job.name=1", "job.name = 1: must be text"),
        ("job.name=1", """must be text; quote it, in a shell twice: '"..."'"""),
        ("job.data.folder=2024-05-01", "must be text; quote it"),
        ("job.optimizer.lr=.001", "job.optimizer.lr = .001: must be a number; write 0.001"),
        ("job.optimizer.lr=1.e-3", "must be a number; write 0.001"),
        ("job.optimizer.lr=infinity", "must be a number; correct the value"),
        ("job.optimizer.steps=1e3", "job.optimizer.steps = 1000.0: must be a whole number; write 1000"),
        ("job.optimizer.steps=0050", "must be a whole number; write 50"),
        ("job.optimizer.steps=50.5", "must be a whole number; correct the value"),
        ("job.optimizer.steps=1e400", "must be a whole number; correct the value"),
        ("job.loop.cuda_graph=True", "job.loop.cuda_graph = True: must be true or false; write true"),
        ("job.loop.cuda_graph=FALSE", "must be true or false; write false"),
        ("job.overlap.windows=maybe", "job.overlap.windows = maybe: must be true, false or auto; correct the value"),
        ("job.overlap.windows=1", "job.overlap.windows = 1: must be true, false or auto"),
        ("job.overlap.windows=True", "must be true, false or auto; write true"),
        ("job.loop.cuda_graph=on", "must be true or false; correct the value"),
        ("job=3", "job = 3: must be a table of keys"),
        ("bogus.x=3", "bogus: unknown key"),
        ("cluster.prices.swich=1", "cluster.prices.swich: unknown key; did you mean switch?"),
        ("cluster.prices.nic=true", "cluster.prices.nic = True"),
    ],
)
def test_a_bad_value_gets_one_line_that_says_how_to_write_it(override: str, words: str) -> None:
    assert words in refusal(override)


def test_every_bad_value_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["cluster.servers=true", "job.model.layers=x", "job.data.max_mib=0"])
    said = str(caught.value)
    assert said.startswith("cluster.servers = True: must be a whole number; correct the value; also ")
    assert "job.model.layers: must be a whole number" in said
    assert "job.data.max_mib: must be above 0" in said
