"""Foundation of every netlayer package: configuration, layout, records, store, launch, report, command."""

__version__ = "0.2.0"
