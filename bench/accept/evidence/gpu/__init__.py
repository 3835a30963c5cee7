"""Readers of NVIDIA's tools: nvidia-smi, dcgmi, NVLink, fabric manager, XIDs."""
