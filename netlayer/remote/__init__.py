"""Other hosts: the one form of host files, connections over ssh, and commands that run on many hosts."""
