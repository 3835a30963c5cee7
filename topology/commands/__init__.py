"""The sub-commands of `netlayer topology`, each loaded when it is called, and what they share."""
