"""A process that fills the embedding cache is killed; what it was told to be stored is there, and nothing is wrong."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from client_agent.cache import EmbeddingCache

VERSION, D = "ab" * 32, 384

WRITER = """
import sys
from pathlib import Path
import numpy as np
from client_agent.cache import EmbeddingCache
cache = EmbeddingCache(Path(sys.argv[1]), sys.argv[2], "text", int(sys.argv[3]))
number = int(sys.argv[4])
while True:
    texts = [str(number + offset) for offset in range(7)]
    vectors = np.stack([np.full(cache.dimension, float(text), np.float32) for text in texts])
    cache.add(texts, vectors)
    number += len(texts)
    print(number, flush=True)
"""


def test_a_killed_process_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    number = 0
    for lines in (1, 20, 50):
        command = [sys.executable, "-c", WRITER, str(tmp_path), VERSION, str(D), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(lines):
                number = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:  # written between our reading and its end; the last line may be cut
                number = int(line) if line.endswith("\n") else number
        with EmbeddingCache(tmp_path, VERSION, "text", D) as cache:
            texts = [str(value) for value in range(number)]
            found, absent = cache.get(texts)
            assert not len(absent)
            assert np.array_equal(found, np.repeat(np.arange(number, dtype=np.float32)[:, None], D, axis=1))
