"""Constants of the protocol that all parties must agree on."""

# Rises with every change that an older peer would misread. `Join` refuses another version.
VERSION = 1

# Most bytes of one gRPC message; larger models travel in chunks (Push, Fetch).
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

# Models and updates up to this length travel inside Task and Update.
INLINE_LIMIT = 1024 * 1024

# Most bytes of one chunk of Push and Fetch. With its frame it fits into a message of 1 MiB.
CHUNK_BYTES = 1024 * 1024 - 4096

# Most bytes of one artifact (a whole model). Protocol Buffers end at 2 GiB, and whoever computes needs several copies.
MAX_ARTIFACT_BYTES = 1024**3

# Most prompt tokens in one request to an oracle: each makes every input longer by one token.
MAX_PROMPTS = 64

# The file that a model's owner publishes to prepare encrypted inputs with.
INPUTS_FORMAT = "veilfed inputs 1"
