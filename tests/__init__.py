"""The tests. This package is imported before any of them."""

import veilfed  # noqa: F401  before grpc, which reads the TLS suites that veilfed sets when it is first imported
