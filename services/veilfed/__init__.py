"""What the parties of Veilfed share: the wire, identities, errors, the command line. Imports no party."""

import os

# TLS 1.2 has no switch in grpc for Python. This one suite needs an RSA certificate under TLS 1.2, and ours are P-256,
# so 1.2 fails and 1.3, whose suites are not listed here, works. grpc reads it when it is imported: hence here.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES256-GCM-SHA384"

# grpc's core writes what it thinks of a failed handshake to the standard error, between our own lines: our errors say
# it in words. Whoever looks for a fault in grpc itself sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.1.0"
