"""The ground that every netlayer package stands on: configuration, layout, records, store, launch, report, command."""

__version__ = "0.2.0"
