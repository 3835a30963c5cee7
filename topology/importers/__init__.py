"""Fabrics of others as a `Graph`: SONiC's config_db.json, lldpcli's JSON, HPCC's topo.txt, htsim's .topo, our GraphML.

`read_fabric` takes files of one format and tells the format from their contents where it is not given; `read_one` is
for a command that has a single option for it.
"""

from topology.importers.reading import FORMATS, Format, detect, link_losses, read_fabric, read_one

__all__ = ["FORMATS", "Format", "detect", "link_losses", "read_fabric", "read_one"]
