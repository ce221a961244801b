"""What the parties of Veilfed share: the wire, identities, errors, the command line. Imports no party."""

__version__ = "0.1.0"
