"""The arena: all control laws on a frozen suite, their tuning and the verdict."""
