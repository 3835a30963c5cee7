"""Public reports of data parallel training that goes wrong, each as a small program: DDP, FSDP2 and our wrapper.

    python -m bench.dropin_reports --tsv FILE [--cases NAME ...] [--sides ddp fsdp2 ours ours_zero2 ours_zero3]

Each program trains ten steps or so in float32 on two gloo ranks and shows what the report is about: losses, parameters,
norms, names. What it shows is compared with plain torch on the whole batch, which every rank computes. A side is
`equal` within 1e-6, or `differs` by so much, or raises with these words, or does not end. Each runs in processes of its
own, for one that fails leaves its peer waiting. The reports' addresses say what others met; the programs are ours.
"""
