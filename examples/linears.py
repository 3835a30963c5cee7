import torch

from collectives import ColumnParallelLinear, RowParallelLinear, open_exchange

torch.distributed.init_process_group("gloo")  # on GPUs "nccl": parts go through the memory of the peers where they can
exchange = open_exchange(torch.distributed.group.WORLD, "cpu")  # of the tensor-parallel ranks
up, down = ColumnParallelLinear(64, 256, exchange=exchange), RowParallelLinear(256, 64, exchange=exchange)
y = down(up(torch.randn(8, 4, 64)).relu())  # positions of this rank, sequences, features: as many positions come out
y.sum().backward()
exchange.close()
torch.distributed.destroy_process_group()
