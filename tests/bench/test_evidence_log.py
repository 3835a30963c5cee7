"""Removal of line prefixes, and safe reading of text from files, gzip and standard input."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest

from bench.accept.evidence import log
from bench.accept.evidence.log import STDIN, Text, expand, read_text
from bench.accept.evidence.prefixes import Prefix, strip_prefixes
from bench.accept.evidence.recognise import parse_all
from netlayer.errors import ConfigError

LOGS = Path(__file__).parent / "logs"
TABLE = (LOGS / "nccl_node0.txt").read_text().splitlines()

# name -> what stands before line n, and what it says of who printed it.
BEFORE = {
    "Open MPI 4": ("[1,0]<stdout>:", Prefix(rank="0")),
    "Open MPI 4, time": ("Sun Jun  1 12:00:07 2025[1,0]<stdout>:", Prefix(rank="0")),
    "Open MPI 5": ("[prterun-head-311@1,0]<stdout>: ", Prefix(rank="0")),
    "Open MPI 5, detailed": ("[prterun-head-311@1,3][node4:4711]<stdout>: ", Prefix(host="node4", rank="3")),
    "hydra": ("[0] ", Prefix(rank="0")),
    "srun": ("0: ", Prefix(rank="0")),
    "srun of many": (" 3: ", Prefix(rank="3")),
    "torchrun": ("[default0]:", Prefix(task="default0")),
    "kubectl": ("[pod/nccl-launcher-x2/main] ", Prefix(task="nccl-launcher-x2")),
    "kubectl, time": ("[pod/nccl-launcher-x2/main] 2025-06-01T12:00:07.123456789Z ", Prefix(task="nccl-launcher-x2")),
    "kubectl time alone": ("2025-06-01T12:00:07.123456789Z ", Prefix()),
    "docker compose": ("bench-1  | ", Prefix(task="bench-1")),
    "pdsh": ("gpu-07: ", Prefix(host="gpu-07")),
    "pdsh of mpirun": ("gpu-07: [1,0]<stdout>:", Prefix(host="gpu-07", rank="0")),
    "SkyPilot": ("(worker1, rank=1, pid=2210, ip=10.0.0.7) ", Prefix(host="10.0.0.7", task="worker1", rank="1")),
    "SkyPilot head": ("(head, rank=0, pid=2210) ", Prefix(task="head", rank="0")),
    "Ray": ("(Bench pid=2210, ip=10.0.0.7) ", Prefix(host="10.0.0.7", task="Bench")),
    "journald": ("Jun 01 12:00:07 node4 nccl.sh[4711]: ", Prefix(host="node4")),
    "journald, ISO": ("2025-06-01T12:00:07+0000 node4 nccl.sh[4711]: ", Prefix(host="node4")),
    "ts": ("Jun 01 12:00:07 ", Prefix()),
    "ts, own format": ("[2025-06-01 12:00:07] ", Prefix()),
    "ts -s": ("00:00:07 ", Prefix()),
    "indentation": ("      ", Prefix()),
    "quote": ("> ", Prefix()),
    "quoted kubectl": ("> [pod/nccl-launcher-x2/main] ", Prefix(task="nccl-launcher-x2")),
    "colour": ("\x1b[32m", Prefix()),
    "coloured compose": ("\x1b[36mbench-1  | \x1b[0m", Prefix(task="bench-1")),
}


@pytest.mark.parametrize("name", BEFORE)
def test_prefixes_are_removed_and_read(name: str) -> None:
    before, prefix = BEFORE[name]
    lines, printed_by = strip_prefixes([before + line for line in TABLE])
    assert lines == TABLE
    assert set(printed_by) == {prefix}


@pytest.mark.parametrize(
    "lines",
    [
        ["GPU 0: NVIDIA H200", "\t Link 0: 26.562 GB/s"] * 4,
        ["NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."] * 4,
        ["Jun  1 12:00:07 node4 kernel: NVRM: Xid (PCI:0000:1b:00): 79"] * 4,
        ["2025-06-01T12:00:07+0000 node4 kernel: NVRM: Xid (PCI:0000:1b:00): 79"] * 4,
        ["[Sun Jun  1 12:00:07 2025] NVRM: loading"] * 4,
        ["[   12.345678] NVRM: loading"] * 4,
        ["node4:4711:4712 [0] NCCL INFO Bootstrap : Using eth0"] * 4,
        ["state: up", "speed: 400", "lanes: 4", "errors: 0"],
        ["| GPU 0 |", "+-------+"] * 4,
    ],
)
def test_a_tool_s_own_output_stays(lines: list[str]) -> None:
    assert strip_prefixes(lines)[0] == lines


def test_a_form_that_few_lines_have_stays() -> None:
    lines = ["> quoted once", "node1: said once", *["   64   16  float  sum  1.0  2.0  3.0"] * 9]
    assert strip_prefixes(lines)[0][:2] == lines[:2]


def test_lines_of_several_hosts_are_told_apart_with_their_numbers() -> None:
    def line(at: int) -> list[str]:
        return [f"node{host}: {at * 10 + host}" for host in (1, 2)]

    text = Text("log", "\n".join(row for at in range(5) for row in line(at)))
    first, second = text.streams()
    assert (first.printed_by.host, first.lines) == ("node1", ["1", "11", "21", "31", "41", ""])
    assert (second.printed_by.host, second.numbers) == ("node2", (2, 4, 6, 8, 10, 10))


def test_blocks_of_dshbak_name_their_host() -> None:
    rule = "-" * 16
    lines, printed_by = strip_prefixes([rule, "node1", rule, "a", "b", rule, "node[2-3]", rule, "c"])
    assert [prefix.host for prefix, line in zip(printed_by, lines, strict=True) if line in "abc"] == [
        "node1",
        "node1",
        "node[2-3]",
    ]


def test_each_host_of_a_mixed_log_gets_its_own(tmp_path: Path) -> None:
    smi = (LOGS / "nvlink_down.txt").read_text().splitlines()
    good = [line.replace("<inactive>", "26.562 GB/s") for line in smi]
    mixed = [f"{host}: {line}" for pair in zip(smi, good, strict=True) for host, line in zip("ab", pair, strict=True)]
    mixed = [line.replace("a: ", "gpu-a: ", 1).replace("b: ", "gpu-b: ", 1) for line in mixed]
    (tmp_path / "log").write_text("\n".join([*mixed, "gpu-c: bash: nvidia-smi: command not found", ""]))
    logs = {entry.host: entry for entry in parse_all(read_text(tmp_path / "log"))}
    assert set(logs) == {"gpu-a", "gpu-b", "gpu-c"}
    fault = next(finding for finding in logs["gpu-a"].findings if finding.verdict == "FAIL")
    assert fault.subject.startswith("gpu-a GPU")
    assert mixed[fault.line - 1].startswith("gpu-a")
    assert all(finding.verdict != "FAIL" for finding in logs["gpu-b"].findings)
    assert [finding.verdict for finding in logs["gpu-c"].findings] == ["WARN"]


def test_progress_written_over_itself_hides_no_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first\r\n  1%\r 50%\r# nThread 1\nlast\n")
    text = read_text(tmp_path / "log")
    assert text.lines == ["first", "  1%", " 50%", "# nThread 1", "last", ""]
    assert [text.number(line) for line in range(1, 6)] == [1, 2, 2, 2, 3]


def test_standard_input_and_gzip_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b"a line\n")

    monkeypatch.setattr(sys, "stdin", Stdin())
    text = read_text(STDIN)
    assert (text.file, text.lines) == ("stdin", ["a line", ""])
    (tmp_path / "log.gz").write_bytes(gzip.compress(b"a line\n"))
    assert read_text(tmp_path / "log.gz").lines == ["a line", ""]


def test_relevant_lines_of_a_large_file_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 100_000)
    monkeypatch.setattr(log, "_CHUNK_BYTES", 4096)
    chatter = [f"node0:1:{at} [0] NCCL INFO Channel {at}/0 : 0[0] -> 1[1] via P2P/CUMEM" for at in range(3000)]
    lines = [*chatter[:1500], *TABLE, *chatter[1500:], ""]
    for name, content in (("log", "\n".join(lines).encode()), ("log.gz", gzip.compress("\n".join(lines).encode()))):
        (tmp_path / name).write_bytes(content)
        text = read_text(tmp_path / name)
        kept = [line for line in TABLE if line.startswith("# ") or "float" in line]
        assert [line for line in text.lines if line in TABLE and line] == kept
        assert lines[text.number(text.lines.index(kept[-1]) + 1) - 1] == kept[-1]
        [parsed] = parse_all(text)
        assert [lines[figure.line - 1].split()[0] for figure in parsed.figures] == [
            line.split()[0] for line in TABLE if "float" in line for _ in range(2)
        ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(bytes(2_000_000)), "zero byte"),
        (gzip.compress(b"x" * 2_000_000), "one line"),
        (gzip.compress(b"a\n" * 1_000_000), "next to empty"),
        (gzip.compress(b"a line of a log, as long as that\n" * 100_000), "unpacks to more than"),
        (gzip.compress(gzip.compress(b"x" * 9999)), "gzip, twice"),
        (gzip.compress(b"x" * 9999)[:-9], "does not unpack"),
        (b"{" + b'"a": 1,\n' * 100_000, "JSON or XML of more"),
        (b"<a>" + b"<b/>\n" * 100_000, "JSON or XML of more"),
        (b"nothing of a known tool\n" * 20_000, "no line of a known tool"),
        (b"# nothing\n" * 200_000, "of lines to judge"),
        (b"nothing of a known tool\n" * 20_000 + b"x" * 999 + b"\x00", "zero byte"),
        (b"\x80\x04\x95.", "binary"),
    ],
    # By default an id holds short bytes, and gzip writes the time into them: workers would collect different tests.
    ids=lambda value: value if isinstance(value, str) else "content",
)
def test_hostile_files_are_refused_in_one_line(
    content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_BYTES", 100_000), ("MAX_UNPACKED_BYTES", 1_000_000), ("_CHUNK_BYTES", 4096)):
        monkeypatch.setattr(log, name, value)
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_text(tmp_path / "log")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_stands_for_its_files_and_skipped_ones_are_listed(tmp_path: Path) -> None:
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    names = ["logs/b.txt", "logs/a.txt", "logs/deep/c.txt", "logs/.hidden", "one.txt"]
    for name in names:
        (tmp_path / name).write_text("x")
    (tmp_path / "logs" / "loop").symlink_to(tmp_path / "logs")
    paths = expand([tmp_path / "one.txt", tmp_path / "logs", STDIN, tmp_path / "logs/a.txt", tmp_path / "empty"])
    inside = [tmp_path / name for name in ("logs/a.txt", "logs/b.txt", "logs/deep/c.txt")]
    assert list(paths.files) == [tmp_path / "one.txt", *inside, STDIN]
    assert paths.in_folders == set(inside) - {tmp_path / "logs/a.txt"}
    for reason in (".hidden", "link to a folder", "no file"):
        assert any(reason in line for line in paths.skipped)
