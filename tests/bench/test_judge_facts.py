"""Facts that public logs taught, each as a small log of our own: what must not be said of it, and what must.

A healthy result must not fail, whatever its version, launcher or page did to its form; a broken one must not pass.
The addresses of the logs that the facts come from are in `reports/judge_logs_202611.tsv`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.accept.judge.logs import Judgement, judge_files
from netlayer.errors import ConfigError

OLD_HEAD = """\
#                                                       out-of-place                       in-place
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
HEAD = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 11.5\n#\n"
ROW = """\
    67108864      16777216     float     sum      -1   5822.4   11.53   11.53      0   5830.1   11.51   11.51      0
"""
SMALL = """\
        8192          2048     float     sum      -1    29.71    0.28    0.28      0    29.60    0.28    0.28      0
"""
HARMLESS = ("PASS", "NO VERDICT")
CAUTIOUS = (*HARMLESS, "WARN")


def start(ranks: int, *hosts: str, gpu: str = "NVIDIA A40") -> str:
    """The head of a run: `ranks` of every host."""
    lines = [
        "# nThread 1 nGpus 1 minBytes 8192 maxBytes 67108864 step: 2(factor) warmup iters: 5 iters: 20 validation: 1"
    ]
    lines += ["#", "# Using devices"]
    for number in range(ranks * len(hosts)):
        host, device = hosts[number // ranks], number % ranks
        lines.append(
            f"#  Rank {number:2d} Group  0 Pid {900 + number:6d} on {host:>10} device {device:2d} [0x1{device}] {gpu}"
        )
    return "\n".join([*lines, "#", ""])


def judged(tmp_path: Path, *texts: str) -> Judgement:
    paths = [tmp_path / f"log{at}.txt" for at in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return judge_files(paths)


def shown(judgement: Judgement) -> str:
    return "\n".join([*map(str, judgement.findings), *judgement.damaged])


WHOLE = start(1, "adder", "boa") + HEAD + SMALL + ROW + TAIL
HEALTHY = {
    # Eleven or twelve cells and an error column, as printed until 2022: 5e-07 is rounding, not 5e-07 wrong elements.
    "a table of 2019 with errors of rounding": start(1, "adder", "boa")
    + OLD_HEAD
    + "    67108864      16777216     float     sum   5822.4   11.53   11.53  5e-07   5830.1   11.51   11.51  4e-07\n"
    + TAIL,
    # The column of the operation is missing with all_gather of that time.
    "a table of 2021 without an operation": start(1, "adder", "boa")
    + OLD_HEAD.replace("   redop ", "")
    + "    67108864       8388608     float   3120.0   21.51   10.75  0e+00   3101.5   21.64   10.82  0e+00\n"
    + TAIL,
    "a run that ends with its last line alone": start(1, "adder", "boa")
    + HEAD
    + SMALL
    + ROW
    + "#\n# Collective test concluded: all_reduce_perf\n",
    "rows and averages that a page shows alone": HEAD + ROW + TAIL,
    "a quoted table": "".join(f"> {line}\n" for line in WHOLE.splitlines()),
    "a table indented in a list": "".join(f"    {line}\n" for line in WHOLE.splitlines()),
    "labels of srun": "".join(f"0: {line}\n" for line in WHOLE.splitlines()),
    "tags of Open MPI": "".join(f"[1,0]<stdout>:{line}\n" for line in WHOLE.splitlines()),
    # Markdown takes the sign at the start of a line for a heading.
    "a table whose # signs the page took": WHOLE.replace("# ", " ").replace("#\n", "\n"),
    # The launcher's own settings stand before it, as a Python dict: the file is no JSON for all that.
    "a launcher's dict before the table": "{'NUM_GPUS': 2, 'SIZE_MB': 64}\nRunning command:\nmpirun -n 2\n" + WHOLE,
    "rows of no bytes at the start": start(1, "adder", "boa")
    + HEAD
    + SMALL.replace("        8192          2048", "           0             0").replace("0.28", "0.00")
    + ROW
    + TAIL,
    "NCCL's lines of every rank between head and rows": start(1, "adder", "boa")
    + "adder:900:911 [0] NCCL INFO Connected all trees\n"
    + HEAD
    + "boa:901:912 [0] NCCL INFO comm 0x55d0 rank 1 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE\n"
    + ROW
    + TAIL,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_result_has_no_bad_finding(tmp_path: Path, name: str) -> None:
    judgement = judged(tmp_path, HEALTHY[name])
    assert not judgement.damaged, shown(judgement)
    assert judgement.verdict in HARMLESS, shown(judgement)


UNCHECKED = ROW.replace("      0 ", "    N/A ").replace("      0\n", "    N/A\n")
CUT = {
    # nccl-tests writes a size and what belongs to it at once and waits then: no program waits within a number.
    "within a number": start(1, "adder", "boa") + HEAD + SMALL + ROW[: ROW.index("11.51") + 3],
    "after a size": start(1, "adder", "boa") + HEAD + SMALL + ROW[:12],
    "on its page, after whole rows": HEAD + SMALL + ROW,
}


@pytest.mark.parametrize("name", CUT)
def test_a_copy_that_was_cut_is_no_hang(tmp_path: Path, name: str) -> None:
    judgement = judged(tmp_path, CUT[name])
    assert judgement.verdict in CAUTIOUS, shown(judgement)


def test_data_that_nobody_checked_is_no_wrong_data(tmp_path: Path) -> None:
    judgement = judged(
        tmp_path, start(1, "adder", "boa").replace("validation: 1", "validation: 0") + HEAD + UNCHECKED + TAIL
    )
    assert judgement.verdict in CAUTIOUS, shown(judgement)


def test_an_alltoall_in_place_of_old_is_not_checked(tmp_path: Path) -> None:
    """Ignore the 1e+00 that alltoall printed in place until 2022: it has no in-place form; the summary says 0 OK."""
    text = start(1, "adder", "boa") + OLD_HEAD
    text += "    67108864       8388608     float             3120.0   21.51   10.75  0e+00"
    text += "   3101.5   21.64   10.82  1e+00\n"
    assert judged(tmp_path, text + TAIL).verdict in CAUTIOUS


BROKEN = {
    "wrong elements before one more column": start(1, "adder", "boa")
    + HEAD.replace("#wrong\n", "#wrong #iters\n")
    + ROW.replace("      0 ", "      3 ", 1).rstrip("\n")
    + "      20\n# Out of bounds values : 3 FAILED\n# Avg bus bandwidth    : 11.5\n",
    "a minimum of its own that was missed": start(1, "adder", "boa")
    + HEAD
    + ROW
    + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 11.5 FAILED\n",
    "a crash before the first row": "nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 2(factor) iters: 20\n"
    "NCCL failure common.cu:874 'unhandled system error'\n",
    "an uncorrectable error of memory": "[  81.20] NVRM: Xid (PCI:0000:3b:00): 48, pid=77, name=python3, "
    "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer\n",
    "a GPU that fell off the bus, quoted": "> [9.1] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, "
    "GPU has fallen off the bus.\n>\n> [9.2] NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_hardware_fails(tmp_path: Path, name: str) -> None:
    judgement = judged(tmp_path, BROKEN[name])
    assert judgement.verdict == "FAIL", shown(judgement)


ALONE = """\
    67108864      16777216     float     sum      -1    210.3  319.11    0.00      0     0.30  223696.2   0.00      0
"""
NOT_PASSED = {
    # No MPI in the build: every process is rank 0 of itself, and nothing is sent.
    "rows of processes that each ran alone": HEAD + ALONE + ALONE + TAIL.replace("11.5", "0"),
    "one rank": start(1, "adder") + HEAD + ALONE + TAIL.replace("11.5", "0"),
    "a transfer that was interrupted": "                    RDMA_Write BW Test\n Device         : mlx5_3\n"
    " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
    " 65536      5000             381.50             381.41               0.727473\n"
    " Completion with error at client\n Failed status 10: wr_id 0 syndrom 0x88\n",
    "peer memory that lost its context": "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, "
    "skipping further processing\n",
}


@pytest.mark.parametrize("name", NOT_PASSED)
def test_logs_without_health_information_do_not_pass(tmp_path: Path, name: str) -> None:
    judgement = judged(tmp_path, NOT_PASSED[name])
    assert judgement.verdict != "PASS", shown(judgement)


def test_two_links_down_among_active_ones_are_not_passed(tmp_path: Path) -> None:
    states = ("25.781 GB/s",) * 3 + ("<inactive>", "25.781 GB/s", "<inactive>")
    links = [f"         Link {at}: {state}" for at, state in enumerate(states)]
    text = "GPU 3: Tesla V100-SXM2-32GB (UUID: GPU-0c0ffee0)\n" + "\n".join(links) + "\n"
    assert judged(tmp_path, text).verdict in ("FAIL", "WARN")


@pytest.mark.parametrize("number", [13, 31, 43])
def test_an_application_s_own_fault_does_not_drain_the_node(tmp_path: Path, number: int) -> None:
    """Warn only: NVIDIA's catalogue says to restart the application."""
    text = f"[  12.5] NVRM: Xid (PCI:0000:3b:00): {number}, pid=4242, name=python3, Ch 00000008\n" * 40
    assert judged(tmp_path, text).verdict in CAUTIOUS


def test_the_text_and_the_json_of_one_diagnosis_agree(tmp_path: Path) -> None:
    rule = "+---------------------------+------------------------------------------------+\n"
    table = "Successfully ran diagnostic for group.\n" + rule
    table += "| Diagnostic                | Result                                         |\n" + rule.replace("-", "=")
    table += "|-----  Deployment  --------+------------------------------------------------|\n"
    table += "| NVML Library              | Pass                                           |\n"
    table += "| Inforom                   | Fail                                           |\n" + rule
    tests = [
        {"name": name, "results": [{"status": word}]} for name, word in (("NVML Library", "Pass"), ("Inforom", "Fail"))
    ]
    tree = {"DCGM GPU Diagnostic": {"test_categories": [{"category": "Deployment", "tests": tests}]}}
    assert judged(tmp_path, table).verdict == judged(tmp_path, json.dumps(tree)).verdict == "FAIL"


FIGURELESS = {
    "a table of placeholders": HEAD
    + ROW.replace("5822.4", "XXXXX").replace("11.53", "XXX.XX").replace("5830.1", "XXXXX"),
    "averages alone": TAIL + TAIL,
    "another vendor's tool": "data_size(Bytes): |   avg_time(us): | alg_bandwidth(GB/s): | check_result:\n"
    "8192              |     764.55    |       0.00998        | success\n",
    "a list of pairs by hand": "adder,boa     49.36\nadder,cobra   88.36\n",
}


@pytest.mark.parametrize("name", FIGURELESS)
def test_logs_without_figures_do_not_pass(tmp_path: Path, name: str) -> None:
    try:
        judgement = judged(tmp_path, FIGURELESS[name])
    except ConfigError as exc:
        pytest.fail(f"one bad file must not stop the others: {exc}")
    assert judgement.damaged or judgement.verdict == "WARN", shown(judgement)
