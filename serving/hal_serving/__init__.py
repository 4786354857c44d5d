"""What engines need beside the operators. Importing this package imports no engine."""

__version__ = "0.1.0"
