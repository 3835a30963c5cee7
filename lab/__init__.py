"""The virtual machine with Soft-RoCE, in which tests marked `rdma` run; see README.md."""
