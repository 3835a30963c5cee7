"""`python -m bench.data_idle`: how long a step waits for its batch, and what reading it costs, beside other loaders.

The job blends two datasets of random tokens by weight, shuffles them and packs documents with masks at their ends; its
steps are those of `netlayer train`. The systems take turns in the same processes, on the same model and files
(Megatron's .bin and .idx, which all of them read):

    loader       ours: one process a machine, batches a step ahead on the device
    no_prefetch  the same samples, read by each rank in the loop (job.data.loader = false)
    torch        torch.utils.data.DataLoader with a worker a rank, over the same samples
    megatron     Megatron-core's blended GPTDataset behind the same, where megatron.core is installed

*Idle* is the time from the end of a step to where the next one's batch is there, in which nothing else can run: on a
GPU between two events of the compute stream around the call for the batch, on a CPU the host's wait. *Cores* are CPU
seconds of loader processes and of threads that copy, over seconds and ranks. *Copies* are bytes that these processes
have read from files over those of the samples that this machine has trained on: 1 where each token is read once.
Megatron maps its files into memory, of which nothing is counted.

Last, the time from opening the data of a run that resumes at a late step, of an index of 10^12 tokens in sparse files,
to its first batch on the device. Not covered: reading from disks (the files stay in the page cache).
"""
