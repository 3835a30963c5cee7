"""Other hosts: the one form of host files, and commands that run on many hosts over ssh."""
